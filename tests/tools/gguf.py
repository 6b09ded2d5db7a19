"""Reads and writes GGUF files with NumPy, independently of the C code it is used to test.

A tensor's `shape` is in the order of the file: shape[0] is contiguous. Arrays are in NumPy's order, so that a matrix of
shape (n_in, n_out) is an array [n_out, n_in].

    model = Reader("model.gguf")
    model.metadata["llama.block_count"]
    model.tensor("token_embd.weight")          # float32 [n_vocab, n_embd]

    w = Writer("new.gguf")
    w.meta("general.architecture", "string", "llama")
    w.tensor("output_norm.weight", "F32", (64,), np.ones(64, np.float32))
    w.close()

Run as a program it decodes blocks: `gguf.py TYPE` reads raw blocks from stdin and writes float32 to stdout.
Layouts: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h there.
"""

import struct
import sys

import numpy as np

VALUE_TYPES = ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"]
VALUE_DTYPES = {"u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4", "f32": "<f4",
                "bool": "<u1", "u64": "<u8", "i64": "<i8", "f64": "<f8"}

# name: number in files, elements and bytes of a block
TENSOR_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2),
}
TENSOR_TYPE_NAMES = {number: name for name, (number, _, _) in TENSOR_TYPES.items()}


def tensor_bytes(type_name, n_elems):
    _, elems, size = TENSOR_TYPES[type_name]
    if n_elems % elems:
        raise ValueError(f"{n_elems} elements are not whole blocks of {type_name}")
    return n_elems // elems * size


# ---- Decoding: blocks as uint8 [n, block bytes] -> float32 [n, block elements] ----

def _f16(b):
    """Two byte columns [n, 2] -> float32 [n, 1]."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(qs):
    """[n, k] bytes -> [n, 2, k]: the low nibbles, then the high ones."""
    return np.stack([qs & 15, qs >> 4], axis=1)


def _crumbs(qs):
    """[n, k] bytes -> [n, 4, k]: bits 0-1, 2-3, 4-5, 6-7."""
    return np.stack([qs >> s & 3 for s in (0, 2, 4, 6)], axis=1)


def _bits(qs):
    """[n, k] bytes -> [n, 8, k]: bit 0 of each byte, bit 1 of each, ..."""
    return np.stack([qs >> s & 1 for s in range(8)], axis=1)


def _decode_f32(b):
    return b.view("<f4").copy()


def _decode_f16(b):
    return b.view("<f2").astype(np.float32)


def _decode_bf16(b):
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(b):
    q = _nibbles(b[:, 2:]).reshape(-1, 32)
    return _f16(b[:, 0:2]) * (q.astype(np.float32) - 8)


def _decode_q4_1(b):
    q = _nibbles(b[:, 4:]).reshape(-1, 32)
    return _f16(b[:, 0:2]) * q.astype(np.float32) + _f16(b[:, 2:4])


def _five_bits(high, qs):
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _nibbles(qs).reshape(-1, 32) | fifth << 4


def _decode_q5_0(b):
    return _f16(b[:, 0:2]) * (_five_bits(b[:, 2:6], b[:, 6:]).astype(np.float32) - 16)


def _decode_q5_1(b):
    return _f16(b[:, 0:2]) * _five_bits(b[:, 4:8], b[:, 8:]).astype(np.float32) + _f16(b[:, 2:4])


def _decode_q8_0(b):
    return _f16(b[:, 0:2]) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _grouped(q, scale, minimum, groups):
    """q [n, 256] with a scale and a minimum [n, groups] for each run of 256 / groups elements."""
    x = q.reshape(len(q), groups, -1).astype(np.float32) * scale[:, :, None]
    return (x if minimum is None else x - minimum[:, :, None]).reshape(len(q), 256)


def _decode_q2_k(b):
    q = np.concatenate([_crumbs(b[:, 16:48]), _crumbs(b[:, 48:80])], axis=1).reshape(-1, 256)
    packed = b[:, 0:16]
    scale = _f16(b[:, 80:82]) * (packed & 15).astype(np.float32)
    minimum = _f16(b[:, 82:84]) * (packed >> 4).astype(np.float32)
    return _grouped(q, scale, minimum, 16)


def _decode_q3_k(b):
    low = np.concatenate([_crumbs(b[:, 32:64]), _crumbs(b[:, 64:96])], axis=1).reshape(-1, 256)
    q = (low | _bits(b[:, 0:32]).reshape(-1, 256) << 2).astype(np.int32) - 4
    s = _nibbles(b[:, 96:104]).reshape(-1, 16) | _crumbs(b[:, 104:108]).reshape(-1, 16) << 4
    return _grouped(q, _f16(b[:, 108:110]) * (s.astype(np.float32) - 32), None, 16)


def _unpack_scales_mins(a):
    """The 12 bytes of Q4_K and Q5_K -> scales [n, 8], mins [n, 8]."""
    scales = np.concatenate([a[:, 0:4] & 63, a[:, 8:12] & 15 | a[:, 0:4] >> 6 << 4], axis=1)
    mins = np.concatenate([a[:, 4:8] & 63, a[:, 8:12] >> 4 | a[:, 4:8] >> 6 << 4], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _k_nibbles(qs):
    """128 bytes, in four runs of 32: the low nibbles of a run, then its high ones."""
    return np.stack([qs.reshape(-1, 4, 32) & 15, qs.reshape(-1, 4, 32) >> 4], axis=2).reshape(-1, 256)


def _decode_q4_k(b):
    scales, mins = _unpack_scales_mins(b[:, 4:16])
    return _grouped(_k_nibbles(b[:, 16:144]), _f16(b[:, 0:2]) * scales, _f16(b[:, 2:4]) * mins, 8)


def _decode_q5_k(b):
    scales, mins = _unpack_scales_mins(b[:, 4:16])
    q = _k_nibbles(b[:, 48:176]) | _bits(b[:, 16:48]).reshape(-1, 256) << 4
    return _grouped(q, _f16(b[:, 0:2]) * scales, _f16(b[:, 2:4]) * mins, 8)


def _decode_q6_k(b):
    low = np.concatenate([_nibbles(b[:, 0:64]), _nibbles(b[:, 64:128])], axis=1).reshape(-1, 256)
    high = np.concatenate([_crumbs(b[:, 128:160]), _crumbs(b[:, 160:192])], axis=1).reshape(-1, 256)
    q = (low | high << 4).astype(np.int32) - 32
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return _grouped(q, _f16(b[:, 208:210]) * scales, None, 16)


_DECODERS = {"F32": _decode_f32, "F16": _decode_f16, "BF16": _decode_bf16, "Q4_0": _decode_q4_0, "Q4_1": _decode_q4_1,
             "Q5_0": _decode_q5_0, "Q5_1": _decode_q5_1, "Q8_0": _decode_q8_0, "Q2_K": _decode_q2_k,
             "Q3_K": _decode_q3_k, "Q4_K": _decode_q4_k, "Q5_K": _decode_q5_k, "Q6_K": _decode_q6_k}


def dequantize(type_name, raw):
    """Bytes (uint8 array or bytes-like) of whole blocks -> float32 [n_elems]."""
    _, elems, size = TENSOR_TYPES[type_name]
    raw = np.frombuffer(raw, np.uint8) if not isinstance(raw, np.ndarray) else raw
    blocks = np.ascontiguousarray(raw).reshape(-1, size)
    out = np.empty((len(blocks), elems), np.float32)
    step = max(1, (1 << 21) // elems)  # bounds the temporaries
    with np.errstate(all="ignore"):
        for i in range(0, len(blocks), step):
            out[i:i + step] = _DECODERS[type_name](blocks[i:i + step])
    return out.reshape(-1)


# ---- Encoding: float32 [n, block elements] -> uint8 [n, block bytes]. Plain rounding; not tuned for quality ----

def _half_bytes(x):
    return np.ascontiguousarray(x.astype("<f2")).view(np.uint8).reshape(len(x), -1)


def _over(x, d):
    """x / d, and 0 where d is 0."""
    return np.divide(x, d, out=np.zeros(np.broadcast_shapes(x.shape, d.shape), np.float32), where=d != 0)


def _round(x, low, high):
    return np.clip(np.rint(x), low, high).astype(np.int32)


def _pack_nibbles(q):
    """[n, 2, k] -> [n, k] bytes, the inverse of _nibbles."""
    return (q[:, 0] | q[:, 1] << 4).astype(np.uint8)


def _pack_crumbs(q):
    return (q[:, 0] | q[:, 1] << 2 | q[:, 2] << 4 | q[:, 3] << 6).astype(np.uint8)


def _pack_bits(q):
    """[n, 8, k] -> [n, k] bytes."""
    return sum(q[:, i].astype(np.uint32) << i for i in range(8)).astype(np.uint8)


def _encode_f32(x):
    return x.astype("<f4").view(np.uint8)


def _encode_f16(x):
    return x.astype("<f2").view(np.uint8)


def _encode_bf16(x):
    u = x.astype("<f4").view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def _encode_symmetric(x, levels):
    """d, q with x ~ d * (q - levels): the value of largest magnitude falls on -levels exactly."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = (peak / -levels).astype(np.float16).astype(np.float32)
    return d, _round(_over(x, d), -levels, levels - 1) + levels


def _encode_offset(x, levels):
    """d, m, q with x ~ d * q + m, q in 0..levels."""
    m = x.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
    d = ((x.max(axis=1, keepdims=True) - m) / levels).astype(np.float16).astype(np.float32)
    return d, m, _round(_over(x - m, d), 0, levels)


def _high_bits(q):
    return np.packbits((q >> 4 & 1).astype(np.uint8), axis=1, bitorder="little")


def _halves(q):
    return _pack_nibbles((q & 15).reshape(len(q), 2, 16))


def _encode_q4_0(x):
    d, q = _encode_symmetric(x, 8)
    return np.hstack([_half_bytes(d), _halves(q)])


def _encode_q4_1(x):
    d, m, q = _encode_offset(x, 15)
    return np.hstack([_half_bytes(d), _half_bytes(m), _halves(q)])


def _encode_q5_0(x):
    d, q = _encode_symmetric(x, 16)
    return np.hstack([_half_bytes(d), _high_bits(q), _halves(q)])


def _encode_q5_1(x):
    d, m, q = _encode_offset(x, 31)
    return np.hstack([_half_bytes(d), _half_bytes(m), _high_bits(q), _halves(q)])


def _encode_q8_0(x):
    d = (np.abs(x).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return np.hstack([_half_bytes(d), _round(_over(x, d), -127, 127).astype(np.int8).view(np.uint8)])


def _encode_groups_offset(x, groups, levels, scale_levels):
    """d, dmin, scales, mins, q with x ~ d * scale * q - dmin * min; scales and mins in 0..scale_levels, q in 0..levels."""
    g = x.reshape(len(x), groups, -1)
    low = np.maximum(-g.min(axis=2), 0)
    step = np.maximum(g.max(axis=2) + low, 0) / levels
    d = (step.max(axis=1, keepdims=True) / scale_levels).astype(np.float16).astype(np.float32)
    dmin = (low.max(axis=1, keepdims=True) / scale_levels).astype(np.float16).astype(np.float32)
    scales, mins = _round(_over(step, d), 0, scale_levels), _round(_over(low, dmin), 0, scale_levels)
    q = _round(_over(g + (dmin * mins)[:, :, None], (d * scales)[:, :, None]), 0, levels)
    return d, dmin, scales, mins, q.reshape(len(x), 256)


def _encode_groups_symmetric(x, groups, low, high, scale_levels):
    """d, scales, q with x ~ d * scale * q; scales in 0..scale_levels, q in low..high."""
    g = x.reshape(len(x), groups, -1)
    step = np.abs(g).max(axis=2) / high
    d = (step.max(axis=1, keepdims=True) / scale_levels).astype(np.float16).astype(np.float32)
    scales = _round(_over(step, d), 0, scale_levels)
    q = _round(_over(g, (d * scales)[:, :, None]), low, high)
    return d, scales, q.reshape(len(x), 256)


def _encode_q2_k(x):
    d, dmin, scales, mins, q = _encode_groups_offset(x, 16, 3, 15)
    packed = (scales | mins << 4).astype(np.uint8)
    qs = np.hstack([_pack_crumbs(half) for half in np.split(q.reshape(len(x), 8, 32), 2, axis=1)])
    return np.hstack([packed, qs, _half_bytes(d), _half_bytes(dmin)])


def _encode_q3_k(x):
    d, scales, q = _encode_groups_symmetric(x, 16, -4, 3, 31)
    q, s = q.reshape(len(x), 8, 32) + 4, scales + 32
    qs = np.hstack([_pack_crumbs(half & 3) for half in np.split(q, 2, axis=1)])
    low = _pack_nibbles((s & 15).reshape(len(x), 2, 8))
    high = _pack_crumbs((s >> 4).reshape(len(x), 4, 4))
    return np.hstack([_pack_bits(q >> 2), qs, low, high, _half_bytes(d)])


def _pack_scales_mins(s, m):
    first = s[:, :4] & 63 | s[:, 4:] >> 4 << 6
    second = m[:, :4] & 63 | m[:, 4:] >> 4 << 6
    third = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return np.hstack([first, second, third]).astype(np.uint8)


def _pack_k_nibbles(q):
    pairs = (q & 15).reshape(len(q), 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8).reshape(len(q), 128)


def _encode_q4_k(x):
    d, dmin, s, m, q = _encode_groups_offset(x, 8, 15, 63)
    return np.hstack([_half_bytes(d), _half_bytes(dmin), _pack_scales_mins(s, m), _pack_k_nibbles(q)])


def _encode_q5_k(x):
    d, dmin, s, m, q = _encode_groups_offset(x, 8, 31, 63)
    high = _pack_bits((q >> 4).reshape(len(x), 8, 32))
    return np.hstack([_half_bytes(d), _half_bytes(dmin), _pack_scales_mins(s, m), high, _pack_k_nibbles(q)])


def _encode_q6_k(x):
    d, scales, q = _encode_groups_symmetric(x, 16, -32, 31, 127)
    q = (q + 32).reshape(len(x), 2, 4, 32)
    low = np.hstack([_pack_nibbles((half & 15).reshape(len(x), 2, 64)) for half in (q[:, 0], q[:, 1])])
    high = np.hstack([_pack_crumbs(half >> 4) for half in (q[:, 0], q[:, 1])])
    return np.hstack([low, high, scales.astype(np.int8).view(np.uint8), _half_bytes(d)])


_ENCODERS = {"F32": _encode_f32, "F16": _encode_f16, "BF16": _encode_bf16, "Q4_0": _encode_q4_0, "Q4_1": _encode_q4_1,
             "Q5_0": _encode_q5_0, "Q5_1": _encode_q5_1, "Q8_0": _encode_q8_0, "Q2_K": _encode_q2_k,
             "Q3_K": _encode_q3_k, "Q4_K": _encode_q4_k, "Q5_K": _encode_q5_k, "Q6_K": _encode_q6_k}


def quantize(type_name, x):
    """float array (a multiple of the block) -> uint8 [bytes]."""
    _, elems, size = TENSOR_TYPES[type_name]
    x = np.ascontiguousarray(x, np.float32).reshape(-1, elems)
    out = np.empty((len(x), size), np.uint8)
    step = max(1, (1 << 20) // elems)
    for i in range(0, len(x), step):
        out[i:i + step] = _ENCODERS[type_name](x[i:i + step])
    return out.reshape(-1)


# ---- Files ----

class Tensor:
    def __init__(self, name, type_name, shape, offset, n_bytes):
        self.name, self.type, self.shape, self.offset, self.n_bytes = name, type_name, shape, offset, n_bytes


class Reader:
    """A whole GGUF file (version 2 or 3): `metadata` key -> value, `types` key -> "u32" or "array of u32", `tensors`."""

    def __init__(self, path):
        self._data = np.memmap(path, np.uint8, "r")
        self._at = 0
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        self.version = self._number("u32")
        if self.version not in (2, 3):
            raise ValueError(f"{path} has version {self.version}")
        n_tensors, n_values = self._number("u64"), self._number("u64")
        self.metadata, self.types, self.tensors = {}, {}, {}
        for _ in range(n_values):
            self._entry()
        infos = [self._info() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        for name, type_name, shape, offset in infos:
            n_bytes = tensor_bytes(type_name, int(np.prod(shape, dtype=np.int64)))
            self.tensors[name] = Tensor(name, type_name, shape, base + offset, n_bytes)

    def _take(self, n):
        if n > len(self._data) - self._at:
            raise ValueError("the file ends early")
        self._at += n
        return self._data[self._at - n:self._at]

    def _number(self, type_name):
        dtype = np.dtype(VALUE_DTYPES[type_name])
        return self._take(dtype.itemsize).view(dtype)[0].item()

    def _string(self):
        return bytes(self._take(self._number("u64"))).decode("utf-8", "surrogateescape")

    def _value(self, type_name):
        if type_name == "string":
            return self._string()
        x = self._number(type_name)
        return bool(x) if type_name == "bool" else x

    def _entry(self):
        key = self._string()
        type_name = VALUE_TYPES[self._number("u32")]
        if type_name != "array":
            self.types[key], self.metadata[key] = type_name, self._value(type_name)
            return
        elem = VALUE_TYPES[self._number("u32")]
        count = self._number("u64")
        self.types[key] = "array of " + elem
        if elem == "string":
            self.metadata[key] = [self._string() for _ in range(count)]
        else:
            dtype = np.dtype(VALUE_DTYPES[elem])
            self.metadata[key] = self._take(count * dtype.itemsize).view(dtype).copy()

    def _info(self):
        name = self._string()
        shape = tuple(self._number("u64") for _ in range(self._number("u32")))
        return name, TENSOR_TYPE_NAMES[self._number("u32")], shape, self._number("u64")

    def raw(self, name):
        """The tensor's bytes as a uint8 array."""
        t = self.tensors[name]
        return self._data[t.offset:t.offset + t.n_bytes]

    def tensor(self, name):
        """The tensor as float32, [n_out, n_in] for a matrix."""
        t = self.tensors[name]
        return dequantize(t.type, self.raw(name)).reshape(t.shape[::-1])


class Writer:
    """Collects metadata and tensors; close() writes the file, streaming tensor data that comes from a function."""

    def __init__(self, path, version=3, alignment=32):
        self._path, self._version, self._alignment = path, version, alignment
        self._entries, self._tensors = [], []
        if alignment != 32:
            self.meta("general.alignment", "u32", alignment)

    @staticmethod
    def _string(s):
        b = s if isinstance(s, bytes) else s.encode("utf-8", "surrogateescape")
        return struct.pack("<Q", len(b)) + b

    def _payload(self, type_name, value):
        if type_name == "string":
            return self._string(value)
        return np.array(value, VALUE_DTYPES[type_name]).tobytes()

    def meta(self, key, type_name, value):
        """type_name is one of VALUE_TYPES, or "array of" one of them."""
        out = self._string(key)
        if type_name.startswith("array of "):
            elem = type_name.removeprefix("array of ")
            out += struct.pack("<IIQ", VALUE_TYPES.index("array"), VALUE_TYPES.index(elem), len(value))
            if elem == "string":
                out += b"".join(self._string(s) for s in value)
            else:
                out += np.asarray(value).astype(VALUE_DTYPES[elem]).tobytes()
        else:
            out += struct.pack("<I", VALUE_TYPES.index(type_name)) + self._payload(type_name, value)
        self._entries.append(out)

    def tensor(self, name, type_name, shape, data):
        """data: a float array, which is quantised; or a function that yields raw chunks (uint8) of all the bytes."""
        n_bytes = tensor_bytes(type_name, int(np.prod(shape, dtype=np.int64)))
        tensor_bytes(type_name, shape[0])  # whole blocks in each row
        self._tensors.append((name, type_name, tuple(shape), n_bytes, data))

    def close(self):
        infos, offset = b"", 0
        for name, type_name, shape, n_bytes, _ in self._tensors:
            infos += self._string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
            infos += struct.pack("<IQ", TENSOR_TYPES[type_name][0], offset)
            offset += -(-n_bytes // self._alignment) * self._alignment
        with open(self._path, "wb") as f:
            f.write(b"GGUF" + struct.pack("<IQQ", self._version, len(self._tensors), len(self._entries)))
            f.writelines(self._entries)
            f.write(infos)
            for name, type_name, _, n_bytes, data in self._tensors:
                f.write(bytes(-f.tell() % self._alignment))
                start = f.tell()
                for chunk in data() if callable(data) else [quantize(type_name, data)]:
                    f.write(memoryview(np.ascontiguousarray(chunk)))
                if f.tell() - start != n_bytes:
                    raise ValueError(f"{name}: {f.tell() - start} bytes were written, {n_bytes} are needed")
            f.write(bytes(-f.tell() % self._alignment))


if __name__ == "__main__":
    sys.stdout.buffer.write(dequantize(sys.argv[1], sys.stdin.buffer.read()).tobytes())
