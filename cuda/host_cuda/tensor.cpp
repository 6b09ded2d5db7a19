/*
 * Tensor-core instructions, lane by lane. Fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16", "...
 * mma.m16n8k32" and "ldmatrix". With g = lane / 4 and t = lane % 4, a lane of m16n8k16 holds
 *
 *   A  a[0]: row g, k 2t, 2t+1    a[1]: row g+8, the same k    a[2]: row g, k 2t+8, 2t+9    a[3]: row g+8, same as a[2]
 *   B  b[0]: k 2t, 2t+1, column g    b[1]: k 2t+8, 2t+9, column g
 *   D  d[0], d[1]: row g, columns 2t, 2t+1    d[2], d[3]: row g+8
 *
 * and of m16n8k32 the same with four bytes where there were two halves: k 4t .. 4t+3, and 16 on instead of 8.
 */
#include "cuda/host_cuda/internal.h"
#include "cuda/host_cuda/warp.h"

namespace host_cuda {

struct fragments {
	const uint32_t *a, *b;
	void *d;
};

static const fragments &of(const lane_op *op)
{
	return *static_cast<const fragments *>(op->in);
}

/* One element of a register: halves, or bytes. */
struct as_half {
	using value = float;
	static const int per_register = 2;
	static float element(uint32_t r, int i) { return half_bits_to_float(static_cast<uint16_t>(r >> (16 * i))); }
};
struct as_bf16 {
	using value = float;
	static const int per_register = 2;
	static float element(uint32_t r, int i) { return bf16_bits_to_float(static_cast<uint16_t>(r >> (16 * i))); }
};
struct as_byte {
	using value = int;
	static const int per_register = 4;
	static int element(uint32_t r, int i) { return static_cast<int8_t>(r >> (8 * i)); }
};

template <typename E> static void run_mma(lane_op *const *lanes, uint32_t)
{
	constexpr int per = E::per_register, half_k = 4 * per;
	typename E::value a[16][2 * half_k], b[8][2 * half_k];
	for (int lane = 0; lane < 32; lane++) {
		const fragments &f = of(lanes[lane]);
		const int g = lane / 4, t = lane % 4;
		for (int i = 0; i < per; i++) {
			const int k = t * per + i;
			a[g][k] = E::element(f.a[0], i);
			a[g + 8][k] = E::element(f.a[1], i);
			a[g][k + half_k] = E::element(f.a[2], i);
			a[g + 8][k + half_k] = E::element(f.a[3], i);
			b[g][k] = E::element(f.b[0], i);
			b[g][k + half_k] = E::element(f.b[1], i);
		}
	}
	for (int lane = 0; lane < 32; lane++) {
		typename E::value *d = static_cast<typename E::value *>(of(lanes[lane]).d);
		for (int i = 0; i < 4; i++) {
			const int row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
			typename E::value sum = 0;
			for (int k = 0; k < 2 * half_k; k++)
				sum += a[row][k] * b[column][k];
			d[i] += sum;
		}
	}
}

static void mma(const char *name, void (*run)(lane_op *const *, uint32_t), void *d, const uint32_t *a,
                const uint32_t *b)
{
	const fragments f = {a, b, d};
	lane_op op = {};
	op.name = name;
	op.mask = ~0u;
	op.run = run;
	op.in = &f;
	collective(op);
}

void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
	mma("mma_f16", run_mma<as_half>, d, a, b);
}

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
	mma("mma_bf16", run_mma<as_bf16>, d, a, b);
}

void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
	mma("mma_s8", run_mma<as_byte>, d, a, b);
}

/*
 * Matrix m's row i is the 16 bytes that lane 8m + i points to. Lane l gets, of matrix m in r[m], the elements 2(l % 4)
 * and 2(l % 4) + 1 of row l / 4; transposed, the same of the transposed matrix.
 */
static void run_ldmatrix(lane_op *const *lanes, uint32_t)
{
	const unsigned n = static_cast<unsigned>(lanes[0]->same & 7);
	const bool trans = (lanes[0]->same & 8) != 0;
	for (unsigned lane = 0; lane < 32; lane++)
		for (unsigned m = 0; m < n; m++) {
			uint16_t pair[2];
			for (unsigned i = 0; i < 2; i++) {
				const unsigned row = trans ? lane % 4 * 2 + i : lane / 4,
					       column = trans ? lane / 4 : lane % 4 * 2 + i;
				memcpy(&pair[i], static_cast<const char *>(lanes[8 * m + row]->in) + 2 * column, 2);
			}
			static_cast<uint32_t *>(lanes[lane]->out)[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
		}
}

void ldmatrix(uint32_t *r, unsigned n, bool trans, shared_place row)
{
	static const char *const names[2][5] = {
		{"", "ldmatrix_x1", "ldmatrix_x2", "", "ldmatrix_x4"},
		{"", "ldmatrix_x1_trans", "ldmatrix_x2_trans", "", "ldmatrix_x4_trans"}};
	lane_op op = {};
	op.name = names[trans][n];
	op.mask = ~0u;
	op.run = run_ldmatrix;
	/*
	 * Each of the first 8n lanes' rows is read; the others' addresses do not matter. The reads are the lane's own.
	 */
	if (self->lane < 8 * n)
		op.in = shared_access(row.offset, 16, 16, row.begin, row.end, access::read);
	op.out = r;
	op.same = n | (trans ? 8u : 0u);
	collective(op);
}

/* ---- conversions that the types use */

float half_bits_to_float(uint16_t h)
{
	static float table[65536];
	static bool made;
	if (!made) {
		for (uint32_t i = 0; i < 65536; i++) {
			const uint32_t sign = (i & 0x8000) << 16, exponent = i >> 10 & 31, fraction = i & 0x3ff;
			if (exponent == 31)
				table[i] = bits<float>(sign | 0x7f800000u | fraction << 13);
			else if (exponent != 0)
				table[i] = bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
			else
				table[i] = bits<float>(sign | bits<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
		}
		made = true;
	}
	return table[h];
}

uint16_t float_to_half_bits(float f)
{
	const uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000;
	const float magnitude = bits<float>(u & 0x7fffffff);
	if (magnitude != magnitude)
		return static_cast<uint16_t>(sign | 0x7fff);
	if (magnitude >= 65520.0f)
		return static_cast<uint16_t>(sign | 0x7c00);
	if (magnitude < 0x1p-14f) /* subnormal: the float adder rounds to a multiple of 2^-24 */
		return static_cast<uint16_t>(sign | (bits<uint32_t>(magnitude + 0.5f) - bits<uint32_t>(0.5f)));
	const uint32_t m = bits<uint32_t>(magnitude), odd = m >> 13 & 1;
	return static_cast<uint16_t>(sign | ((m + 0xfff + odd - (112u << 23)) >> 13));
}

uint16_t float_to_bf16_bits(float f)
{
	const uint32_t u = bits<uint32_t>(f);
	if (f != f)
		return 0x7fff;
	return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

} // namespace host_cuda
