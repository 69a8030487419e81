#include "sys/http.h"

#define CURL_DISABLE_DEPRECATION  // options of all versions of the library are used
#include <curl/curl.h>
#include <dlfcn.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/check.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

constexpr size_t kMaxAnswerBytes = 1 << 20;

void* open_library() {
  for (const char* name : {"libcurl.so.4", "libcurl-gnutls.so.4"})
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  throw InputError(str("HTTP requests need libcurl: ", ::dlerror(),
                       "; hint: install Debian's package libcurl4"));
}

// Functions of the library.
struct Curl {
  void* const library = open_library();
#define COHORT_CURL(member, function) \
  decltype(&::function) member = find<decltype(&::function)>(#function)
  COHORT_CURL(global_init, curl_global_init);
  COHORT_CURL(easy_init, curl_easy_init);
  COHORT_CURL(easy_cleanup, curl_easy_cleanup);
  COHORT_CURL(set, curl_easy_setopt);
  COHORT_CURL(get, curl_easy_getinfo);
  COHORT_CURL(error_text, curl_easy_strerror);
  COHORT_CURL(append, curl_slist_append);
  COHORT_CURL(free_list, curl_slist_free_all);
  COHORT_CURL(multi_init, curl_multi_init);
  COHORT_CURL(multi_cleanup, curl_multi_cleanup);
  COHORT_CURL(add, curl_multi_add_handle);
  COHORT_CURL(remove, curl_multi_remove_handle);
  COHORT_CURL(set_multi, curl_multi_setopt);
  COHORT_CURL(act, curl_multi_socket_action);
  COHORT_CURL(next_message, curl_multi_info_read);
#undef COHORT_CURL
  Curl() {
    global_init(CURL_GLOBAL_DEFAULT);
  }

 private:
  template <class Function>
  Function find(const char* name) const {
    const auto function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr)
      throw InputError(str("libcurl has no ", name, "; hint: version 7.66 or newer"));
    return function;
  }
};

// The library stays open until the process ends, as its documentation advises.
const Curl& curl() {
  static const Curl library;
  return library;
}

struct Exchange {
  HttpAnswer answer;
  std::string request;
  CURL* handle = nullptr;
  char why[CURL_ERROR_SIZE] = "";
};

class CurlClient final : public HttpClient {
 public:
  explicit CurlClient(HttpOptions options) : options_(std::move(options)) {
    options_.headers.emplace_back("Content-Type: application/json");
    options_.headers.emplace_back("Expect:");  // no round trip before large bodies
    for (const std::string& header : options_.headers)
      headers_ = curl_.append(headers_, header.c_str());
    epoll_event event{.events = EPOLLIN, .data = {.fd = wake_.fd()}};
    if (!epoll_.is_open() || multi_ == nullptr ||
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.fd(), &event) != 0)
      throw_errno("cannot wait for a server");
    curl_.set_multi(multi_, CURLMOPT_SOCKETFUNCTION, &watch);
    curl_.set_multi(multi_, CURLMOPT_SOCKETDATA, static_cast<void*>(this));
    curl_.set_multi(multi_, CURLMOPT_TIMERFUNCTION, &set_timer);
    curl_.set_multi(multi_, CURLMOPT_TIMERDATA, static_cast<void*>(this));
  }
  ~CurlClient() override {
    while (!exchanges_.empty()) cancel(exchanges_.begin()->first);
    for (CURL* handle : unused_) curl_.easy_cleanup(handle);
    curl_.multi_cleanup(multi_);
    curl_.free_list(headers_);
  }

  void post(int64_t id, std::string body) override {
    Exchange& exchange = exchanges_[id];
    exchange.answer.id = id;
    exchange.request = std::move(body);
    exchange.handle = unused_.empty() ? make_handle() : unused_.back();
    if (!unused_.empty()) unused_.pop_back();
    const auto set = [&](CURLoption option, auto value) {
      curl_.set(exchange.handle, option, value);
    };
    set(CURLOPT_POSTFIELDS, exchange.request.data());
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(exchange.request.size()));
    set(CURLOPT_WRITEDATA, static_cast<void*>(&exchange));
    set(CURLOPT_PRIVATE, static_cast<void*>(&exchange));
    set(CURLOPT_ERRORBUFFER, exchange.why);
    curl_.add(multi_, exchange.handle);
  }

  void cancel(int64_t id) override {
    const auto node = exchanges_.extract(id);
    if (node.empty()) return;
    curl_.remove(multi_, node.mapped().handle);
    curl_.set(node.mapped().handle, CURLOPT_ERRORBUFFER, static_cast<char*>(nullptr));
    unused_.push_back(node.mapped().handle);
  }

  std::vector<HttpAnswer> wait(Clock::time_point deadline) override {
    using std::chrono::milliseconds;
    const Clock::time_point until = std::min(deadline, timer_);
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
    epoll_event events[64];
    const int count = ::epoll_wait(epoll_.get(), events, std::ssize(events),
                                   static_cast<int>(std::clamp<int64_t>(left, 0, 3600000)));
    for (int i = 0; i < count; ++i) {
      const auto& [mask, data] = events[i];
      if (data.fd == wake_.fd())
        wake_.clear();
      else
        act(data.fd, ((mask & EPOLLIN) ? CURL_CSELECT_IN : 0) |
                         ((mask & EPOLLOUT) ? CURL_CSELECT_OUT : 0) |
                         ((mask & (EPOLLERR | EPOLLHUP)) ? CURL_CSELECT_ERR : 0));
    }
    if (Clock::now() >= timer_) {
      timer_ = Clock::time_point::max();  // unless the call sets it
      act(CURL_SOCKET_TIMEOUT, 0);
    }
    return take_ended();
  }

  void wake() const override { wake_.signal(); }

 private:
  void act(curl_socket_t socket, int events) {
    int running = 0;
    curl_.act(multi_, socket, events, &running);
  }

  // libcurl says which events of a socket it waits for, and when it has to be called at the latest.
  static int watch(CURL*, curl_socket_t socket, int what, void* self, void*) {
    const int epoll = static_cast<CurlClient*>(self)->epoll_.get();
    epoll_event event{.events = 0, .data = {.fd = socket}};
    if ((what & CURL_POLL_IN) != 0) event.events |= EPOLLIN;
    if ((what & CURL_POLL_OUT) != 0) event.events |= EPOLLOUT;
    if (what == CURL_POLL_REMOVE)
      ::epoll_ctl(epoll, EPOLL_CTL_DEL, socket, nullptr);
    else if (::epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event) != 0)  // the usual case
      ::epoll_ctl(epoll, EPOLL_CTL_MOD, socket, &event);
    return 0;
  }
  static int set_timer(CURLM*, long milliseconds, void* self) {
    static_cast<CurlClient*>(self)->timer_ =
        milliseconds < 0 ? Clock::time_point::max()
                         : Clock::now() + std::chrono::milliseconds(milliseconds);
    return 0;
  }

  CURL* make_handle() const {
    CURL* const handle = curl_.easy_init();
    if (handle == nullptr) throw Error("libcurl cannot begin a request");
    const auto set = [&](CURLoption option, auto value) { curl_.set(handle, option, value); };
    set(CURLOPT_URL, options_.url.c_str());
    set(CURLOPT_HTTPHEADER, headers_);
    set(CURLOPT_PROTOCOLS, long{CURLPROTO_HTTP | CURLPROTO_HTTPS});
    set(CURLOPT_HTTP_VERSION, long{CURL_HTTP_VERSION_1_1});
    set(CURLOPT_FOLLOWLOCATION, 0L);
    set(CURLOPT_SSL_VERIFYPEER, 1L);
    set(CURLOPT_SSL_VERIFYHOST, 2L);
    set(CURLOPT_PROXY,
        options_.proxy.c_str());  // also an empty one: those of variables are not used
    set(CURLOPT_NOPROXY, "");
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_TIMEOUT_MS, static_cast<long>(std::ceil(options_.timeout * 1000)));
    set(CURLOPT_WRITEFUNCTION, &receive);
    if (!options_.ca_file.empty()) {
      set(CURLOPT_CAINFO, options_.ca_file.c_str());
      set(CURLOPT_CAPATH, static_cast<const char*>(nullptr));
    }
    return handle;
  }

  static size_t receive(char* bytes, size_t, size_t count, void* exchange) {
    std::string& body = static_cast<Exchange*>(exchange)->answer.body;
    if (body.size() + count > kMaxAnswerBytes) return 0;
    body.append(bytes, count);
    return count;
  }

  std::vector<HttpAnswer> take_ended() {
    std::vector<HttpAnswer> out;
    int left = 0;
    while (CURLMsg* message = curl_.next_message(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const CURLcode code = message->data.result;
      Exchange* exchange = nullptr;
      curl_.get(message->easy_handle, CURLINFO_PRIVATE, &exchange);
      HttpAnswer& answer = exchange->answer;
      if (code == CURLE_OK || code == CURLE_WRITE_ERROR) {
        long status = 0;
        curl_off_t seconds = 0;
        const char* location = nullptr;
        curl_.get(exchange->handle, CURLINFO_RESPONSE_CODE, &status);
        curl_.get(exchange->handle, CURLINFO_RETRY_AFTER, &seconds);
        curl_.get(exchange->handle, CURLINFO_REDIRECT_URL, &location);
        answer.status = static_cast<int>(status);
        answer.retry_after = static_cast<double>(seconds);
        if (location != nullptr) answer.location = location;
        if (code != CURLE_OK) answer.error = "its answer is too long";
      } else {
        answer.error = *exchange->why != 0 ? exchange->why : curl_.error_text(code);
      }
      out.push_back(std::move(answer));
      cancel(out.back().id);
    }
    return out;
  }

  const Curl& curl_ = curl();
  HttpOptions options_;
  curl_slist* headers_ = nullptr;
  CURLM* const multi_ = curl_.multi_init();
  const Descriptor epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  WakeEvent wake_;
  Clock::time_point timer_ = Clock::time_point::max();
  std::map<int64_t, Exchange> exchanges_;  // whose addresses stay
  std::vector<CURL*> unused_;
};

}  // namespace

std::unique_ptr<HttpClient> HttpClient::make(HttpOptions options) {
  if (!options.ca_file.empty()) InputFile(options.ca_file);  // throws if it cannot be read
  return std::make_unique<CurlClient>(std::move(options));
}

}  // namespace cohort
