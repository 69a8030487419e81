// Kernels and copies with their times, recorded by CUPTI, the toolkit's library for that. It is
// loaded when a trace begins: programs that trace nothing do without it.
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <initializer_list>
#include <mutex>
#include <unordered_map>

#include "core/cuda.h"
#include "core/cuda_backend.h"

namespace cohort::cuda {
namespace {

// Calls of the driver and the runtime are of no interest in themselves, but what they have started
// is correlated with an op only where they are recorded.
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
                                         CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_DRIVER};
constexpr auto kOps = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;

// The library's functions.
struct Cupti {
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityRegisterTimestampCallback) register_clock;
  decltype(&cuptiActivityFlushAll) flush;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiActivityPushExternalCorrelationId) push;
  decltype(&cuptiActivityPopExternalCorrelationId) pop;
  decltype(&cuptiGetResultString) result_string;

  Cupti();
};

void* open_library() {
  for (const char* path : {"libcupti.so.13", "/usr/local/cuda/lib64/libcupti.so.13",
                           "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13"})
    if (void* library = dlopen(path, RTLD_NOW)) return library;
  throw InputError(str("a trace of a GPU needs CUPTI: ", dlerror(),
                       "; hint: install the CUDA toolkit's package cuda-cupti-13-0, or name its "
                       "folder in LD_LIBRARY_PATH"));
}

Cupti::Cupti() {
  void* const library = open_library();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) throw InputError(str("CUPTI has no ", name, ": ", dlerror()));
  };
  find(enable, "cuptiActivityEnable");
  find(disable, "cuptiActivityDisable");
  find(register_callbacks, "cuptiActivityRegisterCallbacks");
  find(register_clock, "cuptiActivityRegisterTimestampCallback");
  find(flush, "cuptiActivityFlushAll");
  find(next_record, "cuptiActivityGetNextRecord");
  find(push, "cuptiActivityPushExternalCorrelationId");
  find(pop, "cuptiActivityPopExternalCorrelationId");
  find(result_string, "cuptiGetResultString");
}

const Cupti& cupti() {
  static const Cupti loaded;
  return loaded;
}

void check(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return;
  const char* reason = nullptr;
  cupti().result_string(result, &reason);
  throw InputError(str("a trace of the GPU cannot be had: ", what, ": ",
                       reason == nullptr ? "unknown error" : reason,
                       "; hint: is another profiler at work on this program?"));
}

// What CUPTI has told so far; its own thread calls take().
struct Records {
  std::mutex mutex;
  std::vector<TraceEvent> events;
  std::vector<uint32_t> launches;             // of each event: the call that started it
  std::unordered_map<uint32_t, int64_t> ops;  // of a call
};
Records& records() {
  static Records all;
  return all;
}

// "adamw_kernel", without what it returns and takes, and without this project's namespaces.
std::string kernel_name(const char* mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  for (const std::string_view part :
       {"(anonymous namespace)::", "cohort::", "kernels::", "cuda::", "void "})
    for (size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, part.size());
  if (!name.ends_with(')')) return name;
  // The parenthesis that the last one closes: there may be others in template arguments.
  size_t begin = name.size() - 1;
  for (int open = 1; open > 0 && begin > 0;) {
    const char c = name[--begin];
    open += (c == ')') - (c == '(');
  }
  return name.substr(0, begin);
}

const char* copy_name(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "copy to the device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "copy to the host";
    default:
      return "copy";
  }
}

// Of a record of a kernel, a copy or a fill.
template <class Record>
void take_event(const CUpti_Activity* record, TraceEvent::Kind kind, auto name) {
  const auto* r = reinterpret_cast<const Record*>(record);
  if (r->start == 0 || r->end == 0) return;  // was not measured
  Records& all = records();
  all.events.push_back({.kind = kind,
                        .name = name(*r),
                        .begin = static_cast<int64_t>(r->start),
                        .end = static_cast<int64_t>(r->end),
                        .stream = r->streamId});
  all.launches.push_back(r->correlationId);
}

void take(const CUpti_Activity* record) {
  using Kind = TraceEvent::Kind;
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      return take_event<CUpti_ActivityKernel10>(record, Kind::kKernel,
                                                [](const auto& r) { return kernel_name(r.name); });
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      return take_event<CUpti_ActivityMemcpy6>(
          record, Kind::kCopy, [](const auto& r) { return std::string(copy_name(r.copyKind)); });
    case CUPTI_ACTIVITY_KIND_MEMSET:
      return take_event<CUpti_ActivityMemset4>(record, Kind::kCopy,
                                               [](const auto&) { return std::string("fill"); });
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
      const auto* r = reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
      records().ops[r->correlationId] = static_cast<int64_t>(r->externalId);
      return;
    }
    default:
      return;
  }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *size = 4 << 20;
  *buffer = static_cast<uint8_t*>(std::malloc(*size));
  if (*buffer == nullptr) *size = 0;  // CUPTI drops what there is no room for
  *max_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard lock(records().mutex);
  CUpti_Activity* record = nullptr;
  while (cupti().next_record(buffer, valid, &record) == CUPTI_SUCCESS) take(record);
  std::free(buffer);
}

uint64_t CUPTIAPI clock_now() {
  return static_cast<uint64_t>(trace_clock());
}

}  // namespace

void start_kernel_trace() {
  check(cupti().register_clock(clock_now), "its clock");
  check(cupti().register_callbacks(give_buffer, take_buffer), "its buffers");
  for (const CUpti_ActivityKind kind : kKinds) check(cupti().enable(kind), "its start");
}

std::vector<TraceEvent> finish_kernel_trace() {
  COHORT_CUDA_CHECK(cudaDeviceSynchronize());
  for (const CUpti_ActivityKind kind : kKinds) check(cupti().disable(kind), "its end");
  check(cupti().flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "its records");
  const std::lock_guard lock(records().mutex);
  Records& all = records();
  for (size_t i = 0; i < all.events.size(); ++i)
    if (const auto op = all.ops.find(all.launches[i]); op != all.ops.end())
      all.events[i].op = op->second;
  all.launches.clear();
  all.ops.clear();
  return std::exchange(all.events, {});
}

void enter_op(int64_t index) {
  cupti().push(kOps, static_cast<uint64_t>(index));
}

void leave_op() {
  uint64_t index = 0;
  cupti().pop(kOps, &index);
}

}  // namespace cohort::cuda
