#!/usr/bin/env python3
"""Writes a file as a C array: embed.py INPUT OUTPUT NAME defines NAME[] and NAME_len."""
import sys

source, target, name = sys.argv[1:]
data = open(source, "rb").read()
rows = (data[i:i + 20] for i in range(0, len(data), 20))
with open(target, "w", encoding="ascii") as out:
    out.write('#include "server/web/web.h"\n\nconst unsigned char %s[] = {\n' % name)
    out.writelines("\t" + "".join("%d," % b for b in row) + "\n" for row in rows)
    out.write("\t0};\nconst size_t %s_len = sizeof %s - 1;\n" % (name, name))
