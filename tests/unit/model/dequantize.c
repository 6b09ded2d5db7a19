/* `dequantize TYPE` decodes the blocks on stdin with the reference dequantiser and writes floats to stdout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/quant.h"

int main(int argc, char **argv)
{
	const struct quant_format *f = NULL;
	for (size_t i = 0; argc == 2 && (f = quant_format_at(i)) && strcmp(f->name, argv[1]) != 0; i++)
		;
	if (!f) {
		fprintf(stderr, "usage: dequantize TYPE < blocks > floats\n");
		return 2;
	}
	uint8_t block[256];
	float x[256];
	while (fread(block, f->block_bytes, 1, stdin) == 1) {
		f->dequantize(block, x, f->block_elems);
		if (fwrite(x, sizeof *x, f->block_elems, stdout) != f->block_elems)
			return 1;
	}
	return ferror(stdin) || fflush(stdout) != 0;
}
