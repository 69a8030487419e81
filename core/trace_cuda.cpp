// Trace of kernels and copies by CUPTI, the CUDA toolkit's profiling library. It is loaded when a
// trace begins, so that it is not a dependency of programs that do not trace.
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

// Driver and runtime calls must be recorded for the correlation of kernels with ops.
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
                                         CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_DRIVER};
constexpr auto kOps = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;

void* open_library() {
  for (const char* path : {"libcupti.so.13", "/usr/local/cuda/lib64/libcupti.so.13",
                           "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13"})
    if (void* library = dlopen(path, RTLD_NOW)) return library;
  throw InputError(str("a trace of a GPU needs CUPTI: ", dlerror(),
                       "; hint: install the CUDA toolkit's package cuda-cupti-13-0, or name its "
                       "folder in LD_LIBRARY_PATH"));
}

// Functions of the library.
struct Cupti {
  void* const library = open_library();
#define COHORT_CUPTI(member, function) \
  decltype(&function) member = find<decltype(&function)>(#function)
  COHORT_CUPTI(enable, cuptiActivityEnable);
  COHORT_CUPTI(disable, cuptiActivityDisable);
  COHORT_CUPTI(register_callbacks, cuptiActivityRegisterCallbacks);
  COHORT_CUPTI(register_clock, cuptiActivityRegisterTimestampCallback);
  COHORT_CUPTI(flush, cuptiActivityFlushAll);
  COHORT_CUPTI(next_record, cuptiActivityGetNextRecord);
  COHORT_CUPTI(push, cuptiActivityPushExternalCorrelationId);
  COHORT_CUPTI(pop, cuptiActivityPopExternalCorrelationId);
  COHORT_CUPTI(result_string, cuptiGetResultString);
#undef COHORT_CUPTI

 private:
  template <class Function>
  Function find(const char* name) const {
    const auto function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) throw InputError(str("CUPTI has no ", name, ": ", dlerror()));
    return function;
  }
};

const Cupti& cupti() {
  static const Cupti loaded;
  return loaded;
}

void check(CUptiResult result, const char* step) {
  if (result == CUPTI_SUCCESS) return;
  const char* reason = nullptr;
  cupti().result_string(result, &reason);
  throw InputError(str("cannot trace the GPU: ", step, ": ",
                       reason == nullptr ? "unknown error" : reason,
                       "; hint: another profiler may be attached to this process"));
}

// Records received from CUPTI, whose own thread calls add_record().
struct Records {
  std::mutex mutex;
  std::vector<TraceEvent> events;
  std::vector<uint32_t> launches;             // correlation id of each event
  std::unordered_map<uint32_t, int64_t> ops;  // op index by correlation id
};
Records& records() {
  static Records all;
  return all;
}

// Demangled name without return type, parameters and this project's namespaces: "adamw_kernel".
std::string kernel_name(const char* mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  for (const std::string_view part :
       {"(anonymous namespace)::", "cohort::", "kernels::", "cuda::", "void "})
    for (size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, part.size());
  if (!name.ends_with(')')) return name;
  // Finds the matching opening parenthesis; template arguments may contain others.
  size_t begin = name.size() - 1;
  for (int open = 1; open > 0 && begin > 0;) {
    const char c = name[--begin];
    open += (c == ')') - (c == '(');
  }
  return name.substr(0, begin);
}

const char* copy_name(uint8_t kind) {
  if (kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD) return "copy to the device";
  return kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "copy to the host" : "copy";
}

// Adds the event of a kernel, copy or fill record.
template <class Record>
void add_event(const CUpti_Activity* record, TraceEvent::Kind kind, auto name) {
  const auto* r = reinterpret_cast<const Record*>(record);
  if (r->start == 0 || r->end == 0) return;  // not measured
  Records& all = records();
  all.events.push_back({.kind = kind,
                        .name = name(*r),
                        .begin = static_cast<int64_t>(r->start),
                        .end = static_cast<int64_t>(r->end),
                        .stream = r->streamId});
  all.launches.push_back(r->correlationId);
}

void add_record(const CUpti_Activity* record) {
  using Kind = TraceEvent::Kind;
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      return add_event<CUpti_ActivityKernel10>(record, Kind::kKernel,
                                               [](const auto& r) { return kernel_name(r.name); });
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      return add_event<CUpti_ActivityMemcpy6>(
          record, Kind::kCopy, [](const auto& r) { return std::string(copy_name(r.copyKind)); });
    case CUPTI_ACTIVITY_KIND_MEMSET:
      return add_event<CUpti_ActivityMemset4>(record, Kind::kCopy,
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

void CUPTIAPI allocate_buffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *size = 4 << 20;
  *buffer = static_cast<uint8_t*>(std::malloc(*size));
  if (*buffer == nullptr) *size = 0;  // CUPTI drops records without a buffer
  *max_records = 0;
}

void CUPTIAPI process_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard lock(records().mutex);
  CUpti_Activity* record = nullptr;
  while (cupti().next_record(buffer, valid, &record) == CUPTI_SUCCESS) add_record(record);
  std::free(buffer);
}

uint64_t CUPTIAPI clock_now() {
  return static_cast<uint64_t>(trace_clock());
}

}  // namespace

void start_kernel_trace() {
  check(cupti().register_clock(clock_now), "clock");
  check(cupti().register_callbacks(allocate_buffer, process_buffer), "buffers");
  for (const CUpti_ActivityKind kind : kKinds) check(cupti().enable(kind), "start");
}

std::vector<TraceEvent> finish_kernel_trace() {
  COHORT_CUDA_CHECK(cudaDeviceSynchronize());
  for (const CUpti_ActivityKind kind : kKinds) check(cupti().disable(kind), "end");
  check(cupti().flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "flush");
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
