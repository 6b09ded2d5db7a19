/*
 * Streams and events. An operation waits in its stream until somebody needs it done; then everything that it comes
 * after is done first: what is before it in its stream, the events its stream waited for, and the default stream's
 * rules.
 */
#include <chrono>

#include "cuda/host_cuda/internal.h"

namespace host_cuda {

/* Handles are never given out twice, so that a use after the end is seen; the lists outlive every static destructor. */
static std::vector<stream_impl *> &streams = *new std::vector<stream_impl *>;
static std::vector<event_impl *> &events = *new std::vector<event_impl *>;
static std::vector<capture_state *> &captures = *new std::vector<capture_state *>;
static uint64_t last_number;

static double now_ms()
{
	return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

stream_impl *null_stream()
{
	if (streams.empty())
		streams.push_back(new stream_impl);
	return streams[0];
}

stream_impl *stream_of(cudaStream_t s)
{
	if (!s)
		return null_stream();
	for (stream_impl *known : streams)
		if (known == s && s->alive)
			return s;
	misuse("a stream is used that does not exist");
	error(cudaErrorInvalidResourceHandle);
	return nullptr;
}

static bool exists(cudaEvent_t e)
{
	for (event_impl *known : events)
		if (known == e && e->alive)
			return true;
	misuse("an event is used that does not exist");
	error(cudaErrorInvalidResourceHandle);
	return false;
}

/* ---- doing what is queued */

static void drop_everything()
{
	for (stream_impl *s : streams) {
		s->queue.clear();
		s->done = s->last;
	}
}

static cudaError_t do_first(stream_impl *s)
{
	const queued q = std::move(s->queue.front());
	s->queue.pop_front();
	for (const auto &dependency : q.after) {
		const cudaError_t e = drain(dependency.first, dependency.second);
		if (e != cudaSuccess)
			return e;
	}
	const cudaError_t e = q.op.run ? q.op.run() : cudaSuccess;
	s->done = q.number;
	if (e == cudaSuccess)
		return e;
	sticky = e;
	last_error = e;
	drop_everything();
	return e;
}

cudaError_t drain(stream_impl *s, uint64_t number)
{
	while (sticky == cudaSuccess && !s->queue.empty() && s->queue.front().number <= number)
		do_first(s);
	return sticky;
}

cudaError_t drain_all()
{
	for (size_t i = 0; i < streams.size(); i++)
		drain(streams[i], streams[i]->last);
	return sticky;
}

/* In order by chance, a GPU may have come this far or that by now. */
static void maybe_run_some()
{
	if (!order_state || chance() % 4 != 0)
		return;
	stream_impl *s = streams[chance() % streams.size()];
	if (!s->queue.empty())
		drain(s, s->queue[chance() % s->queue.size()].number);
}

/* Blocking streams and the default stream wait for each other (CUDA Runtime API, "Stream synchronization behavior"). */
static void add_default_stream_rules(stream_impl *s, queued &q)
{
	stream_impl *null = null_stream();
	if (s == null) {
		for (stream_impl *other : streams)
			if (other != s && other->blocking && !other->queue.empty())
				q.after.emplace_back(other, other->last);
	} else if (s->blocking && !null->queue.empty()) {
		q.after.emplace_back(null, null->last);
	}
}

static void push(stream_impl *s, operation op, std::vector<std::pair<stream_impl *, uint64_t>> after = {})
{
	queued q = {std::move(op), ++last_number, std::move(after)};
	add_default_stream_rules(s, q);
	s->last = q.number;
	s->queue.push_back(std::move(q));
}

cudaError_t submit(stream_impl *s, operation op)
{
	if (s->capture) {
		s->capture->graph->ops.push_back(std::move(op));
		return cudaSuccess;
	}
	if (s == null_stream())
		for (const capture_state *c : captures)
			if (c->origin->blocking)
				return error(cudaErrorStreamCaptureUnsupported);
	push(s, std::move(op));
	maybe_run_some();
	return sticky;
}

cudaError_t enqueue(cudaStream_t stream, const char *name, std::function<void()> work)
{
	HOST_CUDA_ENTER("enqueue");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	operation op;
	op.name = name;
	op.run = [work]() {
		const device_memory_scope open;
		work();
		return cudaSuccess;
	};
	return submit(s, std::move(op));
}

void streams_reset()
{
	drop_everything();
	for (stream_impl *s : streams)
		s->capture = nullptr;
	for (capture_state *c : captures) {
		delete c->graph;
		delete c;
	}
	captures.clear();
}

/* ---- capture */

bool capture_forbids()
{
	bool forbidden = false;
	for (capture_state *c : captures)
		if (c->mode != cudaStreamCaptureModeRelaxed)
			forbidden = c->invalid = true;
	return forbidden;
}

/* Waiting for a stream that captures is an error and ends the capture. */
static bool captures_now(stream_impl *s)
{
	if (!s->capture)
		return false;
	s->capture->invalid = true;
	return true;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
	HOST_CUDA_ENTER("cudaStreamBeginCapture");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	if (s == null_stream() || s->capture)
		return error(cudaErrorStreamCaptureUnsupported);
	s->capture = new capture_state{s, mode, new graph_impl, {s}};
	captures.push_back(s->capture);
	return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	/* What fails here has ended the capture all the same. */
	const cudaError_t entered = enter("cudaStreamEndCapture");
	stream_impl *s = stream_of(stream);
	*graph = nullptr;
	if (!s)
		return last_error;
	capture_state *c = s->capture;
	if (!c || c->origin != s)
		return error(cudaErrorIllegalState);
	for (stream_impl *joined : c->joined)
		joined->capture = nullptr;
	for (event_impl *e : events)
		if (e->capture == c)
			e->capture = nullptr;
	for (size_t i = 0; i < captures.size(); i++)
		if (captures[i] == c)
			captures.erase(captures.begin() + static_cast<long>(i));
	const bool invalid = c->invalid;
	if (invalid || entered != cudaSuccess)
		delete c->graph;
	else
		*graph = c->graph;
	delete c;
	if (entered != cudaSuccess)
		return entered;
	return invalid ? error(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
	HOST_CUDA_ENTER("cudaStreamIsCapturing");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	*status = !s->capture           ? cudaStreamCaptureStatusNone
	          : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
	                                : cudaStreamCaptureStatusActive;
	return cudaSuccess;
}

/* ---- streams */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
	HOST_CUDA_ENTER("cudaStreamCreateWithFlags");
	null_stream();
	stream_impl *s = new stream_impl;
	s->blocking = !(flags & cudaStreamNonBlocking);
	streams.push_back(s);
	*stream = s;
	return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
	return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int)
{
	return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
	HOST_CUDA_ENTER("cudaDeviceGetStreamPriorityRange");
	*least = 0;
	*greatest = -5;
	return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	const cudaError_t entered = enter("cudaStreamDestroy");
	stream_impl *s = stream_of(stream);
	if (!s || s == null_stream())
		return error(cudaErrorInvalidResourceHandle);
	const cudaError_t e = drain(s, s->last);
	s->alive = false;
	return entered != cudaSuccess ? entered : e;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaStreamSynchronize");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	if (captures_now(s))
		return error(cudaErrorStreamCaptureUnsupported);
	if (s == null_stream())
		for (stream_impl *other : streams)
			if (other->blocking)
				drain(other, other->last);
	return drain(s, s->last);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaStreamQuery");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	if (s->queue.empty())
		return cudaSuccess;
	/* Somebody who asks again and again must see progress. */
	const cudaError_t e = drain(s, s->queue.front().number);
	return e != cudaSuccess ? e : s->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize()
{
	HOST_CUDA_ENTER("cudaDeviceSynchronize");
	if (capture_forbids())
		return error(cudaErrorStreamCaptureUnsupported);
	return drain_all();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void *), void *arg)
{
	HOST_CUDA_ENTER("cudaLaunchHostFunc");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	operation op;
	op.name = "host function";
	op.run = [function, arg]() {
		function(arg);
		return cudaSuccess;
	};
	return submit(s, std::move(op));
}

/* ---- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
	HOST_CUDA_ENTER("cudaEventCreateWithFlags");
	event_impl *e = new event_impl;
	e->timing = !(flags & cudaEventDisableTiming);
	events.push_back(e);
	*event = e;
	return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
	return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	const cudaError_t entered = enter("cudaEventDestroy");
	if (!exists(event))
		return last_error;
	/* Its record may still be queued and refers to it; the handle stays in the list. */
	event->alive = false;
	return entered;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaEventRecord");
	stream_impl *s = stream_of(stream);
	if (!s || !exists(event))
		return last_error;
	if (s->capture) {
		event->capture = s->capture;
		return cudaSuccess;
	}
	operation op;
	op.name = "event";
	op.run = [event]() {
		event->done_ms = now_ms();
		return cudaSuccess;
	};
	event->capture = nullptr;
	event->stream = s;
	event->number = last_number + 1;
	return submit(s, std::move(op));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
	HOST_CUDA_ENTER("cudaStreamWaitEvent");
	stream_impl *s = stream_of(stream);
	if (!s || !exists(event))
		return last_error;
	if (event->capture) {
		if (s->capture && s->capture != event->capture)
			return error(cudaErrorStreamCaptureUnsupported);
		if (!s->capture) {
			s->capture = event->capture;
			event->capture->joined.push_back(s);
		}
		return cudaSuccess;
	}
	if (s->capture) { /* an event outside the capture cannot be waited for within */
		s->capture->invalid = true;
		return error(cudaErrorStreamCaptureUnsupported);
	}
	if (event->stream && event->stream != s)
		push(s, operation(), {{event->stream, event->number}});
	return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
	HOST_CUDA_ENTER("cudaEventSynchronize");
	if (!exists(event))
		return last_error;
	if (event->capture) {
		event->capture->invalid = true;
		return error(cudaErrorStreamCaptureUnsupported);
	}
	return event->stream ? drain(event->stream, event->number) : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
	HOST_CUDA_ENTER("cudaEventQuery");
	if (!exists(event))
		return last_error;
	if (!event->stream || event->stream->done >= event->number)
		return cudaSuccess;
	const cudaError_t e = drain(event->stream, event->stream->queue.front().number);
	return e != cudaSuccess ? e : event->stream->done >= event->number ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
	HOST_CUDA_ENTER("cudaEventElapsedTime");
	if (!exists(start) || !exists(end))
		return last_error;
	if (!start->stream || !end->stream || !start->timing || !end->timing)
		return error(cudaErrorInvalidResourceHandle);
	if (start->stream->done < start->number || end->stream->done < end->number)
		return cudaErrorNotReady;
	*ms = static_cast<float>(end->done_ms - start->done_ms);
	return cudaSuccess;
}

} // namespace host_cuda
