#!/usr/bin/env python3
"""Makes the chat page one file and writes it as C: embed.py PAGE OUTPUT.

@@NAME@@ in the page stands for the file of that name beside it. The output defines web_index_html[], its length, and
web_index_csp: a Content-Security-Policy that allows this very style and this very script, by their hashes, and nothing else.
"""
import base64
import hashlib
import os
import re
import sys

source, target = sys.argv[1:]
here = os.path.dirname(os.path.abspath(source))


def text(name):
    with open(os.path.join(here, name), encoding="utf-8") as f:
        return f.read()


page = re.sub(r"@@([\w.]+)@@", lambda m: text(m[1]), text(os.path.basename(source)))


def source_of(tag):
    inner = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
    return " ".join("'sha256-%s'" % base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in inner)


csp = (f"default-src 'none'; style-src {source_of('style')}; script-src {source_of('script')}; img-src data:; connect-src 'self'; "
       "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
data = page.encode()
with open(target, "w", encoding="ascii") as out:
    out.write('#include "server/web/web.h"\n\nconst unsigned char web_index_html[] = {\n')
    for i in range(0, len(data), 20):
        out.write("\t" + "".join("%d," % b for b in data[i:i + 20]) + "\n")
    out.write("\t0};\nconst size_t web_index_html_len = sizeof web_index_html - 1;\n")
    out.write('const char web_index_csp[] = "%s";\n' % csp)
