#include "engine/model/rope.h"

#include <math.h>

/*
 * YaRN (arXiv:2309.00071, section 3.2): the pair index at which a wave turns `rotations` times within the original
 * context, d * ln(L / (2 pi rotations)) / (2 ln base).
 */
static double yarn_pair(const struct model_params *p, double rotations)
{
	return p->rope_dims * log(p->rope_original_ctx / (rotations * 2.0 * M_PI)) / (2.0 * log((double)p->rope_base));
}

/*
 * How much of pair i is interpolated: 0 for fast waves (left as they are), 1 for slow ones (stretched by the factor), a
 * ramp between. The ends are rounded outwards and kept inside the head, as the authors' code does.
 */
static double yarn_interpolation(const struct model_params *p, int32_t i)
{
	double low = fmax(floor(yarn_pair(p, (double)p->yarn_beta_fast)), 0.0);
	double high = fmin(ceil(yarn_pair(p, (double)p->yarn_beta_slow)), p->rope_dims - 1.0);
	double ramp = (i - low) / fmax(high - low, 0.001);
	double clamped = fmin(fmax(ramp, 0.0), 1.0);
	return 1.0 - (1.0 - clamped) * (double)p->yarn_ext_factor;
}

/*
 * Llama 3.1's scaling, as published with the model: by wavelength, with a linear ramp in 1 / wavelength between two
 * bounds.
 */
static double llama3_frequency(const struct model_params *p, double freq)
{
	double original = p->rope_original_ctx, low = (double)p->rope_low_freq_factor,
	       high = (double)p->rope_high_freq_factor;
	double wavelength = 2.0 * M_PI / freq;
	if (wavelength < original / high)
		return freq;
	if (wavelength > original / low)
		return freq / (double)p->rope_factor;
	double smooth = (original / wavelength - low) / (high - low);
	return (1.0 - smooth) * freq / (double)p->rope_factor + smooth * freq;
}

void rope_frequencies(const struct model_params *p, const float *factors, float *inv_freq)
{
	for (int32_t i = 0; i < p->rope_dims / 2; i++) {
		double freq = pow((double)p->rope_base, -2.0 * i / p->rope_dims);
		if (factors)
			freq /= (double)factors[i];
		switch (p->rope_scaling) {
		case ROPE_SCALING_NONE:
			break;
		case ROPE_SCALING_LINEAR:
			freq /= (double)p->rope_factor;
			break;
		case ROPE_SCALING_LLAMA3:
			if (!factors)
				freq = llama3_frequency(p, freq);
			break;
		case ROPE_SCALING_YARN: {
			double part = yarn_interpolation(p, i);
			freq = part * freq / (double)p->rope_factor + (1.0 - part) * freq;
			break;
		}
		}
		inv_freq[i] = (float)freq;
	}
}

void rope_frequencies_local(const struct model_params *p, float *inv_freq)
{
	for (int32_t i = 0; i < p->rope_dims / 2; i++)
		inv_freq[i] = (float)pow((double)p->rope_base_local, -2.0 * i / p->rope_dims);
}

float rope_magnitude(const struct model_params *p)
{
	double magnitude = (double)p->rope_attn_factor;
	/* YaRN, section 3.4: sqrt(1/t) = 0.1 ln(s) + 1, on q and on k. */
	if (p->rope_scaling == ROPE_SCALING_YARN && p->yarn_ext_factor != 0.0f)
		magnitude *= 1.0 + 0.1 * log((double)p->rope_factor);
	return (float)magnitude;
}
