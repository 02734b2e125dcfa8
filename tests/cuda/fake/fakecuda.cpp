// A libcuda.so.1 for tests without a GPU: the calls of the driver that PyCUDA and gpu_worker/device/cuda.py make.
//
// "Device" memory is host memory (memory.h), streams are queues (streams.h), kernels run in launches.cpp and matrix products in
// products.cpp. All other functions that PyCUDA is linked against answer "not supported" (build.py adds them).
#include "memory.h"

// devices and contexts ------------------------------------------------------------------------------------------------
API int cuInit(unsigned) { return !state.card_count ? NO_DEVICE : OK; }
API int cuDriverGetVersion(int* version) { return *version = 13000, OK; }
API int cuGetErrorString(int result, const char** text) {
  static thread_local char buffer[80];
  const char* known = nullptr;
  switch (result) {
    case OK: known = "no error"; break;
    case INVALID_VALUE: known = "invalid argument"; break;
    case OUT_OF_MEMORY: known = "out of memory"; break;
    case NO_DEVICE: known = "no CUDA-capable device is detected"; break;
    case INVALID_CONTEXT: known = "invalid device context"; break;
    case ALREADY_REGISTERED: known = "part or all of the requested memory range is already mapped"; break;
    case NOT_REGISTERED: known = "pointer does not correspond to a registered memory region"; break;
    case LAUNCH_FAILED: known = "unspecified launch failure"; break;
    case NOT_SUPPORTED: known = "operation not supported"; break;
    case CAPTURE_UNSUPPORTED: known = "operation not permitted when stream is capturing"; break;
    case CAPTURE_INVALIDATED: known = "operation failed due to a previous error during capture"; break;
  }
  snprintf(buffer, sizeof buffer, "%s", known ? known : "error of the fake driver");
  return *text = buffer, OK;
}
API int cuDeviceGetCount(int* n) { return *n = state.card_count, OK; }
API int cuDeviceGet(int* device, int index) {
  return *device = index, index < 0 || index >= state.card_count ? INVALID_DEVICE : OK;
}
API int cuDeviceGetName(char* name, int n, int index) { return snprintf(name, n, "fake card %d", index), OK; }
API int cuDeviceComputeCapability(int* major, int* minor, int) { return *major = 9, *minor = 0, OK; }
API int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = state.card_bytes, OK; }
API int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 1: *value = 1024; break;               // threads of a block
    case 8: *value = 48 << 10; break;          // shared memory of a block
    case 10: *value = 32; break;                // threads of a warp
    case 16: *value = 132; break;               // multiprocessors
    case 75: *value = 9; break;                 // compute capability
    case 76: *value = 0; break;
    case 97: *value = MOST_SHARED; break;       // shared memory of a block that asks
    default: *value = 1;
  }
  return OK;
}
API int cuDevicePrimaryCtxRetain(void** context, int index) {
  LOCKED;
  if (index < 0 || index >= state.card_count) return INVALID_DEVICE;
  Card& card = state.cards[index];
  if (!card.retained++) count(counted::contexts);
  return *context = &card, OK;
}
API int cuDevicePrimaryCtxRelease_v2(int index) {
  LOCKED;
  Card& card = state.cards[index];
  if (!card.retained) return INVALID_CONTEXT;
  if (!--card.retained) drain_all(), count(counted::contexts, -1);
  return OK;
}
API int cuCtxPushCurrent_v2(void* context) { return contexts.push_back((Card*)context), OK; }
API int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return INVALID_CONTEXT;
  if (context) *context = contexts.back();
  return contexts.pop_back(), OK;
}
API int cuCtxSetCurrent(void* context) {
  if (!contexts.empty()) contexts.pop_back();
  if (context) contexts.push_back((Card*)context);
  return OK;
}
API int cuCtxGetCurrent(void** context) { return *context = current(), OK; }
API int cuCtxGetDevice(int* device) { return current() ? (*device = current()->index, OK) : INVALID_CONTEXT; }
API int cuCtxSynchronize() {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuCtxSynchronize");
  drain_all();
  check_ends();
  unmap_given_back();
  return state.sticky;
}

// memory ---------------------------------------------------------------------------------------------------------------
API int cuMemAlloc_v2(void** at, size_t bytes) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuMemAlloc");
  return allocate(*current(), bytes, false, at);
}
API int cuMemFree_v2(uintptr_t at) {
  LOCKED;
  NOT_IN_CAPTURE("cuMemFree");
  return give_back(at);
}
API int cuMemGetInfo_v2(size_t* free_bytes, size_t* all) {
  IN_CONTEXT;
  *all = state.card_bytes;
  *free_bytes = state.card_bytes - current()->used;
  return OK;
}
API int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuMemHostAlloc");
  if (!bytes) return INVALID_VALUE;
  *at = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*at == MAP_FAILED) return OUT_OF_MEMORY;
  memset(*at, 0xFF, bytes);
  pinned[(uintptr_t)*at] = {bytes, -1};
  count(counted::pinned);
  count(counted::pinned_bytes, bytes);
  return OK;
}
API int cuMemFreeHost(void* at) {
  LOCKED;
  NOT_IN_CAPTURE("cuMemFreeHost");
  return release(pinned, at, counted::pinned, counted::pinned_bytes, true);
}
API int cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuMemHostRegister");
  if (!bytes || (uintptr_t)at % PAGE || bytes % PAGE) return INVALID_VALUE;  // stricter than today's driver, which rounds
  if (overlaps(registered, (uintptr_t)at, bytes) || overlaps(pinned, (uintptr_t)at, bytes)) return ALREADY_REGISTERED;
  if (!mapped(at, bytes)) return INVALID_VALUE;
  registered[(uintptr_t)at] = {bytes, -1};
  count(counted::registrations);
  count(counted::registered_bytes, bytes);
  return OK;
}
API int cuMemHostUnregister(void* at) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuMemHostUnregister");
  return release(registered, at, counted::registrations, counted::registered_bytes, false);
}
API int cuMemHostGetDevicePointer_v2(void** device_at, void* at, unsigned) {
  LOCKED;
  return *device_at = at, page_locked(at, 1) ? OK : INVALID_VALUE;
}

// copies: the blocking ones are ordered with the legacy default stream only ---------------------------------------------
static int copy_now(void* to, const void* from, size_t bytes) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("a blocking copy");
  count(counted::copies);
  drain(&null_stream, null_stream.put);
  memmove(to, from, bytes);
  return state.sticky;
}
API int cuMemcpyHtoD_v2(void* to, const void* from, size_t n) { return copy_now(to, from, n); }
API int cuMemcpyDtoH_v2(void* to, const void* from, size_t n) { return copy_now(to, from, n); }
API int cuMemcpyDtoD_v2(void* to, const void* from, size_t n) { return copy_now(to, from, n); }
API int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t n, void* stream) {
  IN_CONTEXT;
  return copy_async(to, from, n, stream, from);
}
API int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t n, void* stream) {
  IN_CONTEXT;
  return copy_async(to, from, n, stream, to);
}
API int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t n, void* stream) {
  IN_CONTEXT;
  return copy_async(to, from, n, stream, nullptr);
}
API int cuMemsetD8Async(void* at, unsigned char value, size_t n, void* stream) {
  IN_CONTEXT;
  return submit(stream_of(stream), {[=] { memset(at, value, n); }});
}
API int cuMemsetD32Async(unsigned* at, unsigned value, size_t n, void* stream) {
  IN_CONTEXT;
  return submit(stream_of(stream), {[=] { std::fill(at, at + n, value); }});
}

// streams and events ---------------------------------------------------------------------------------------------------
API int cuStreamCreate(void** stream, unsigned) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuStreamCreate");
  streams.push_back(new Stream);
  count(counted::streams);
  return *stream = streams.back(), OK;
}
API int cuStreamDestroy_v2(void* stream) {
  LOCKED;
  Stream* s = stream_of(stream);
  if (!s->alive || s == &null_stream) return INVALID_HANDLE;
  drain(s, s->put);
  s->alive = false;
  count(counted::streams, -1);
  return OK;
}
API int cuStreamSynchronize(void* stream) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuStreamSynchronize");
  Stream* s = stream_of(stream);
  drain(s, s->put);
  return state.sticky;
}
API int cuStreamQuery(void* stream) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuStreamQuery");
  Stream* s = stream_of(stream);
  poll(s, s->put);
  return state.sticky ? state.sticky : s->done < s->put ? NOT_READY : OK;
}
API int cuStreamWaitEvent(void* stream, Event* event, unsigned) {
  IN_CONTEXT;
  Stream* s = stream_of(stream);
  if (capture.stream == s) {
    if (event->in_capture && event->stream == s) return OK;  // the stream's own order
    return spoils_capture("cuStreamWaitEvent for an event from outside", CAPTURE_ISOLATION);
  }
  if (event->in_capture) return spoils_capture("cuStreamWaitEvent on another stream, for a captured event");
  if (!event->stream) return OK;
  Stream* from = event->stream;
  uint64_t at = event->at;  // the record in force now
  return submit(s, {[=] { drain(from, at); }});
}
API int cuEventCreate(Event** event, unsigned) {
  IN_CONTEXT;
  count(counted::events);
  return *event = new Event, OK;
}
API int cuEventDestroy_v2(Event* event) {
  LOCKED;
  delete event;
  count(counted::events, -1);
  return OK;
}
API int cuEventRecord(Event* event, void* stream) {
  IN_CONTEXT;
  Stream* s = stream_of(stream);
  *event = {s, s->put, capture.stream == s};
  return state.sticky;
}
API int cuEventQuery(Event* event) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuEventQuery");
  if (event->in_capture) return CAPTURED_EVENT;
  if (!event->stream) return OK;
  poll(event->stream, event->at);
  return state.sticky ? state.sticky : event->stream->done < event->at ? NOT_READY : OK;
}
API int cuEventSynchronize(Event* event) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuEventSynchronize");
  if (event->in_capture) return CAPTURED_EVENT;
  if (event->stream) drain(event->stream, event->at);
  return state.sticky;
}
API int cuEventElapsedTime_v2(float* ms, Event*, Event*) { return *ms = 0.001f, OK; }

// graphs ---------------------------------------------------------------------------------------------------------------
API int cuStreamBeginCapture_v2(void* stream, unsigned) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuStreamBeginCapture");
  capture = {stream_of(stream), std::make_shared<Graph>(), OK};
  count(counted::captures);
  return OK;
}
API int cuStreamEndCapture(void* stream, void** graph) {
  IN_CONTEXT;
  *graph = nullptr;
  if (capture.stream != stream_of(stream)) return INVALID_VALUE;
  Capture ended = std::move(capture);
  capture = {};
  if (ended.broken) return CAPTURE_INVALIDATED;
  *graph = new std::shared_ptr<Graph>(ended.graph);
  count(counted::graphs);
  return OK;
}
API int cuGraphInstantiateWithFlags(void** executable, std::shared_ptr<Graph>* graph, unsigned long long) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuGraphInstantiate");
  count(counted::executables);
  return *executable = new std::shared_ptr<Graph>(*graph), OK;
}
API int cuGraphLaunch(std::shared_ptr<Graph>* executable, void* stream) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuGraphLaunch");
  if (state.sticky) return state.sticky;
  count(counted::graph_launches);
  for (auto& op : (*executable)->ops) enqueue(stream_of(stream), op);
  return OK;
}
API int cuGraphExecDestroy(std::shared_ptr<Graph>* executable) {
  LOCKED;
  delete executable;
  count(counted::executables, -1);
  return OK;
}
API int cuGraphDestroy(std::shared_ptr<Graph>* graph) {
  LOCKED;
  delete graph;
  count(counted::graphs, -1);
  return OK;
}

// for the overlay of torch_on_card and for tests --------------------------------------------------------------------------
API int fakecuda_zeros(int card, void** at, size_t bytes) {
  LOCKED;
  NOT_IN_CAPTURE("an allocation");
  return allocate(state.cards[card], bytes, true, at);
}
API const char* fakecuda_counter_names() { return counter_names(); }
API const uint64_t* fakecuda_counters() {
  LOCKED;
  check_ends();
  return state.counts;
}
API void fakecuda_configure(const char* mode, int cards, size_t card_bytes, int run) {
  LOCKED;
  drain_all();
  set_mode(mode);
  state.card_count = std::min(cards, MOST_CARDS);
  state.card_bytes = card_bytes;
  state.run = run;
  state.sticky = OK;
}
