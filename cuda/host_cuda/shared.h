/*
 * Shared memory with a shadow. Each byte knows who wrote and who read it last and when, so that three things are
 * errors: reading what this block has not written, leaving an array or its alignment, and two threads' accesses to one
 * byte, at least one of them a write, that no barrier separates.
 */
#pragma once

#include <type_traits>

#include "cuda/host_cuda/exec.h"

namespace host_cuda {

enum class access { read, write, atomic };

/* Checks an access of the running thread and returns where the bytes are. [begin, end) are the array's offsets. */
void *shared_access(int64_t offset, unsigned bytes, unsigned alignment, int64_t begin, int64_t end, access how);

/*
 * Offset of the static array declared at `site` in the running block, made on first use; and of the launch's dynamic
 * bytes.
 */
int64_t static_shared(const void *site, size_t bytes);
int64_t dynamic_shared();

template <typename T> class shared_span;

/* One element: reading and assigning are checked accesses. */
template <typename T> class shared_ref
{
public:
	shared_ref(int64_t offset, int64_t begin, int64_t end) : offset_(offset), begin_(begin), end_(end) {}
	operator std::remove_const_t<T>() const
	{
		return *static_cast<const T *>(at(access::read));
	}
	const shared_ref &operator=(std::remove_const_t<T> v) const
	{
		*static_cast<T *>(at(access::write)) = v;
		return *this;
	}
	const shared_ref &operator=(const shared_ref &other) const
	{
		return *this = static_cast<std::remove_const_t<T>>(other);
	}
	shared_ref(const shared_ref &) = default;
	template <typename U> const shared_ref &operator+=(U v) const { return *this = get() + v; }
	template <typename U> const shared_ref &operator-=(U v) const { return *this = get() - v; }
	template <typename U> const shared_ref &operator*=(U v) const { return *this = get() * v; }
	template <typename U> const shared_ref &operator/=(U v) const { return *this = get() / v; }
	template <typename U> const shared_ref &operator|=(U v) const { return *this = get() | v; }
	template <typename U> const shared_ref &operator&=(U v) const { return *this = get() & v; }
	template <typename U> const shared_ref &operator^=(U v) const { return *this = get() ^ v; }
	shared_span<T> operator&() const { return shared_span<T>(offset_, begin_, end_); }

private:
	std::remove_const_t<T> get() const { return *this; }
	void *at(access how) const { return shared_access(offset_, sizeof(T), alignof(T), begin_, end_, how); }
	int64_t offset_, begin_, end_;
};

/* A pointer into an array of shared memory. */
template <typename T> class shared_span
{
public:
	shared_span() : offset_(-1), begin_(0), end_(0) {}
	shared_span(int64_t offset, int64_t begin, int64_t end) : offset_(offset), begin_(begin), end_(end) {}
	/* shared_span<const T> from shared_span<T>, as with pointers. */
	template <typename U, typename = std::enable_if_t<std::is_same_v<T, const U>>>
	shared_span(const shared_span<U> &o) : offset_(o.offset()), begin_(o.begin_offset()), end_(o.end_offset())
	{
	}
	template <typename I> shared_ref<T> operator[](I i) const
	{
		return shared_ref<T>(offset_ + static_cast<int64_t>(i) * static_cast<int64_t>(sizeof(T)), begin_, end_);
	}
	shared_ref<T> operator*() const { return (*this)[0]; }
	template <typename I> shared_span operator+(I i) const { return &(*this)[i]; }
	template <typename I> shared_span operator-(I i) const { return &(*this)[-static_cast<int64_t>(i)]; }
	template <typename I> shared_span &operator+=(I i) { return *this = *this + i; }
	template <typename I> shared_span &operator-=(I i) { return *this = *this - i; }
	shared_span &operator++() { return *this += 1; }
	int64_t operator-(const shared_span &o) const
	{
		return (offset_ - o.offset_) / static_cast<int64_t>(sizeof(T));
	}
	bool operator==(const shared_span &o) const { return offset_ == o.offset_; }
	bool operator!=(const shared_span &o) const { return offset_ != o.offset_; }
	bool operator<(const shared_span &o) const { return offset_ < o.offset_; }

	int64_t offset() const { return offset_; }
	int64_t begin_offset() const { return begin_; }
	int64_t end_offset() const { return end_; }
	void *at(unsigned bytes, unsigned alignment, access how) const
	{
		return shared_access(offset_, bytes, alignment, begin_, end_, how);
	}

private:
	int64_t offset_, begin_, end_;
};

template <typename U, typename T> inline shared_span<U> shared_cast(const shared_span<T> &s)
{
	return shared_span<U>(s.offset(), s.begin_offset(), s.end_offset());
}

template <typename V, typename T> inline V ld_shared(const shared_span<T> &s)
{
	V v;
	memcpy(&v, s.at(sizeof(V), alignof(V), access::read), sizeof v);
	return v;
}

template <typename V, typename T> inline void st_shared(const shared_span<T> &s, V v)
{
	memcpy(s.at(sizeof(V), alignof(V), access::write), &v, sizeof v);
}

/* V is deduced from the value; it must not be taken from the span. */
template <typename T> inline shared_span<T> static_shared_span(const void *site, size_t count)
{
	const int64_t offset = static_shared(site, count * sizeof(T));
	return shared_span<T>(offset, offset, offset + static_cast<int64_t>(count * sizeof(T)));
}

template <typename T> inline shared_span<T> dynamic_shared_span()
{
	const int64_t offset = dynamic_shared();
	return shared_span<T>(offset, offset, offset + static_cast<int64_t>(current.dynamic_shared));
}

#define HOST_CUDA_ATOMIC(name, expression)                                                                             \
	template <typename T, typename U> inline T name(const shared_span<T> &s, U operand)                            \
	{                                                                                                              \
		T *p = static_cast<T *>(s.at(sizeof(T), alignof(T), access::atomic));                                  \
		const T old = *p, v = static_cast<T>(operand);                                                         \
		*p = (expression);                                                                                     \
		return old;                                                                                            \
	}                                                                                                              \
	template <typename T, typename U> inline T name(T *p, U operand)                                               \
	{                                                                                                              \
		const T old = *p, v = static_cast<T>(operand);                                                         \
		*p = (expression);                                                                                     \
		return old;                                                                                            \
	}
/* Threads take turns only at collectives, so plain arithmetic is atomic here. */
HOST_CUDA_ATOMIC(atomicAdd, old + v)
HOST_CUDA_ATOMIC(atomicSub, old - v)
HOST_CUDA_ATOMIC(atomicMax, old < v ? v : old)
HOST_CUDA_ATOMIC(atomicMin, v < old ? v : old)
HOST_CUDA_ATOMIC(atomicAnd, old & v)
HOST_CUDA_ATOMIC(atomicOr, old | v)
HOST_CUDA_ATOMIC(atomicXor, old ^ v)
HOST_CUDA_ATOMIC(atomicExch, v)
HOST_CUDA_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
HOST_CUDA_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
#undef HOST_CUDA_ATOMIC

template <typename T, typename U, typename W> inline T atomicCAS(const shared_span<T> &s, U expected, W desired)
{
	T *p = static_cast<T *>(s.at(sizeof(T), alignof(T), access::atomic));
	const T old = *p;
	if (old == static_cast<T>(expected))
		*p = static_cast<T>(desired);
	return old;
}
template <typename T, typename U, typename W> inline T atomicCAS(T *p, U expected, W desired)
{
	const T old = *p;
	if (old == static_cast<T>(expected))
		*p = static_cast<T>(desired);
	return old;
}

} // namespace host_cuda

#define GPU_SHARED(type, name, count)                                                                                  \
	static const char name##_site = 0;                                                                             \
	const host_cuda::shared_span<type> name = host_cuda::static_shared_span<type>(&name##_site, (count))
#define GPU_DYNAMIC_SHARED(type, name) const host_cuda::shared_span<type> name = host_cuda::dynamic_shared_span<type>()
