/* Where the blocks of quantised formats keep what random bits may not be: their halves. */
#pragma once

#include "engine/model/quant.h"

/* Where a block of a quantised format keeps its halves: the scale, and the minimum or -1. */
static inline void block_halves(enum quant_type type, int *scale, int *min)
{
	*scale = 0;
	*min = -1;
	switch (type) {
	case QUANT_Q4_1:
	case QUANT_Q5_1:
	case QUANT_Q4_K:
	case QUANT_Q5_K:
		*min = 2;
		break;
	case QUANT_Q2_K:
		*scale = 80;
		*min = 82;
		break;
	case QUANT_Q3_K:
		*scale = 108;
		break;
	case QUANT_Q6_K:
		*scale = 208;
		break;
	default:
		break;
	}
}
