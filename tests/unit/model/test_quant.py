"""The C dequantisers against the NumPy ones of tests/tools/gguf.py, bit for bit: test_quant.py PATH_OF_dequantize."""

import subprocess
import sys
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("skipped: NumPy is not installed")
    sys.exit(77)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gguf  # noqa: E402


def decode_in_c(program, type_name, raw):
    out = subprocess.run([program, type_name], input=raw.tobytes(), stdout=subprocess.PIPE, check=True).stdout
    return np.frombuffer(out, np.float32)


def check(program, type_name, raw, what):
    c, py = decode_in_c(program, type_name, raw), gguf.dequantize(type_name, raw)
    same = (c.view(np.uint32) == py.view(np.uint32)) | (np.isnan(c) & np.isnan(py))
    if len(c) != len(py) or not same.all():
        at = int(np.argmin(same))
        print(f"{type_name}, {what}: element {at} is {c[at]!r} in C and {py[at]!r} in NumPy")
        return 1
    return 0


def check_encoder(type_name, rng):
    """What the encoder writes decodes close to what it was given: its error is that of the format's bits."""
    limit = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01, "Q6_K": 0.03, "Q5_0": 0.06, "Q5_1": 0.06, "Q5_K": 0.06,
             "Q4_0": 0.12, "Q4_1": 0.12, "Q4_K": 0.12, "Q3_K": 0.25, "Q2_K": 0.4}[type_name]
    x = rng.standard_normal(64 * 256, np.float32)
    y = gguf.dequantize(type_name, gguf.quantize(type_name, x))
    error = float(np.sqrt(np.mean((x - y) ** 2)))
    if error > limit:
        print(f"{type_name}: the encoder is off by {error:.3f} of the deviation; {limit} was expected at most")
        return 1
    return 0


def main(program):
    rng = np.random.default_rng(7)
    failures = 0
    for type_name, (_, elems, size) in gguf.TENSOR_TYPES.items():
        blocks = max(1024, 65536 // elems)
        failures += check(program, type_name, rng.integers(0, 256, blocks * size, dtype=np.uint8), "random bytes")
        x = rng.standard_normal(256 * 256, np.float32) * rng.uniform(0.01, 10, 256).repeat(256).astype(np.float32)
        failures += check(program, type_name, gguf.quantize(type_name, x), "quantised numbers")
        failures += check_encoder(type_name, rng)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
