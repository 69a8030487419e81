// One thread serves all connections.
#include "rl/http_pool.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>

#include "core/log.h"
#include "core/progress.h"
#include "sys/http.h"
#include "text/json.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr double kMaxDelay = 60;     // seconds until the next try
constexpr double kFirstMinutes = 2;  // until an outage before the first answer ends the pool
constexpr double kQuiet = 10;        // seconds of an outage before it is said, and then every 60
constexpr size_t kMinSecret = 6;     // bytes of a value that other text is unlikely to have

// Calls literal() and variable() for the pieces of "Bearer ${NAME}".
template <class Literal, class Variable>
void split_value(const std::string& value, const Literal& literal, const Variable& variable) {
  for (size_t at = 0; at < value.size();) {
    const size_t begin = value.find("${", at), end = value.find('}', begin);
    if (begin == value.npos || end == value.npos) return literal(value.substr(at));
    literal(value.substr(at, begin - at));
    variable(value.substr(begin + 2, end - begin - 2));
    at = end + 1;
  }
}

bool is_loopback(const std::string& host) {
  in_addr address{};
  return host == "localhost" || host == "[::1]" ||
         (host.starts_with("127.") && ::inet_pton(AF_INET, host.c_str(), &address) == 1);
}

// The host of "https://HOST:PORT/PATH". Throws InputError naming the key.
std::string host_of(const std::string& url, const char* key = "url") {
  const size_t begin = url.starts_with("http://") ? 7 : url.starts_with("https://") ? 8 : 0;
  const std::string authority = url.substr(begin, url.find_first_of("/?#", begin) - begin);
  const size_t end = authority.starts_with('[') ? authority.find(']') + 1 : authority.find(':');
  const std::string host = authority.substr(0, end);
  const bool plain = std::ranges::all_of(url, [](char c) { return c > ' ' && c < 0x7f; });
  if (url.find('@') != url.npos)
    throw InputError(str(key,
                         ": has a user name or a password, which the configuration is no place "
                         "for; hint: headers_env of the server"));
  if (begin == 0 || host.empty() || !plain || authority.find('\\') != authority.npos)
    throw InputError(
        str(key, ": expected http://HOST:PORT/PATH or https://..., got ", excerpt(url)));
  return host;
}

// The headers with the values of the environment, which are added to `secrets`.
std::vector<std::string> headers_of(const ServerConfig& server, std::vector<std::string>& secrets) {
  std::vector<std::string> out;
  for (const auto& [name, value] : server.headers_env) {
    std::string header = name + ": ";
    split_value(
        value, [&](const std::string& text) { header += text; },
        [&](const std::string& variable) {
          const char* const found = std::getenv(variable.c_str());
          const std::string text = found == nullptr ? "" : found;
          const bool is_short = text.size() < kMinSecret;
          if (is_short || text.find_first_of("\r\n") != text.npos)
            throw InputError(str("headers_env.", name, ": the variable ", variable,
                                 " of the environment ",
                                 text.empty() ? "is not set"
                                 : is_short   ? "is too short for a key"
                                              : "has several lines",
                                 "; hint: export ", variable, "=... before the command"));
          // As text, and as JSON may spell it.
          const std::string json = Json(text).dump();
          secrets.push_back(text);
          secrets.push_back(json.substr(1, json.size() - 2));
          secrets.push_back(replaced(secrets.back(), "/", "\\/"));
          header += text;
        });
    out.push_back(std::move(header));
  }
  // One may begin another.
  std::ranges::sort(secrets, std::greater(), &std::string::size);
  return out;
}

class HttpPool final : public RequestPool {
 public:
  explicit HttpPool(HttpPoolOptions options)
      : options_(std::move(options)),
        client_(HttpClient::make({.url = options_.server.url,
                                  .headers = headers_of(options_.server, secrets_),
                                  .ca_file = options_.server.ca_file,
                                  .proxy = options_.server.proxy,
                                  .timeout = options_.timeout})) {
    start();
  }
  ~HttpPool() override { end(); }

 private:
  struct Tried : Request {
    int64_t tries = 0;                 // that have failed since the end of the last outage
    Clock::time_point failed_at = {};  // the first of them
  };

  void wake() override { client_->wake(); }

  void serve(std::vector<Request> submitted, int64_t first) override {
    for (; !active_.empty() && active_.begin()->first < first; active_.erase(active_.begin()))
      client_->cancel(active_.begin()->first);
    std::erase_if(waiting_, [&](const auto& entry) { return entry.second.number < first; });
    if (active_.empty() && waiting_.empty()) {
      num_together_ = 0;
      silent_since_.reset();
      says_again_.reset();
    }
    for (Request& request : submitted)
      waiting_.emplace(Clock::time_point(), Tried{std::move(request)});
    num_together_ = std::max(num_together_, active_.size() + waiting_.size());
    for (const HttpAnswer& answer : client_->wait(begin_due())) receive(answer);
    check_outage();
  }

  // Sends the requests that are due. Returns when the next ones are.
  Clock::time_point begin_due() {
    const Clock::time_point now = Clock::now();
    while (!waiting_.empty() && waiting_.begin()->first <= now &&
           std::ssize(active_) < options_.concurrent) {
      Tried& request = waiting_.begin()->second;
      const int64_t id = request.number;
      client_->post(id, request.line);
      active_.emplace(id, std::move(request));
      waiting_.erase(waiting_.begin());
    }
    Clock::time_point next = now + (silent_since_ ? seconds(1) : std::chrono::hours(1));
    if (!waiting_.empty() && std::ssize(active_) < options_.concurrent)
      next = std::min(next, waiting_.begin()->first);
    return next;
  }

  void receive(const HttpAnswer& answer) {
    Tried request = std::move(active_.extract(answer.id).mapped());
    const int status = answer.status;
    if (status == 0 || status == 408 || status == 429 || status >= 500)
      return try_again(std::move(request), answer);
    last_answer_ = Clock::now();
    end_outage();
    if (status < 200 || status > 299 || !answer.error.empty())
      return finish(request, {"", problem(answer)});
    std::string line = without_secrets(answer.body),
                error = options_.validate ? options_.validate(request.line, line) : "";
    finish(request, {error.empty() ? std::move(line) : "", std::move(error)});
  }

  void try_again(Tried request, const HttpAnswer& answer) {
    const Clock::time_point now = Clock::now();
    if (!silent_since_) silent_since_ = now;
    last_problem_ = problem(answer);
    if (request.tries == 0 || end_of_outage_ >= request.failed_at) {
      request.tries = 0;
      request.failed_at = now;
    }
    const size_t others = active_.size() + waiting_.size();
    const bool is_outage =
        last_answer_ <= request.failed_at && others > 0 &&
        static_cast<double>(others + 1) > kMaxFailedFraction * static_cast<double>(num_together_);
    if (++request.tries > options_.server.retries && !is_outage)
      return finish(
          request,
          {"", str(last_problem_,
                   request.tries > 1 ? str(", at the last of ", request.tries, " tries") : "")});
    double delay = std::ldexp(1.0, static_cast<int>(std::min<int64_t>(request.tries - 1, 6)));
    if (answer.retry_after > 0) delay = answer.retry_after;
    waiting_.emplace(now + seconds(std::min(delay, kMaxDelay)), std::move(request));
  }

  // Waiting for a server is progress until the outage is too long, which ends the pool.
  void check_outage() {
    if (!silent_since_) return;
    const Clock::time_point now = Clock::now();
    const double configured = options_.server.outage_minutes,
                 minutes = last_answer_ ? configured : std::min(configured, kFirstMinutes);
    if (now - *silent_since_ >= seconds(60 * minutes))
      throw InputError(str(options_.name, ": ", options_.server.url, " has answered nothing for ",
                           minutes, " minutes; the last problem: ", last_problem_,
                           "; hint: is the server running, and the url right?"));
    if (now - *silent_since_ < seconds(kQuiet)) return;
    if (const std::atomic<bool>* stop = options_.server.stop; stop != nullptr && *stop)
      throw InputError(str(options_.name, ": the run was asked to stop while ", options_.server.url,
                           " answers nothing; the last problem: ", last_problem_));
    note_progress();
    if (says_again_ && now < *says_again_) return;
    says_again_ = now + seconds(60);
    logging::warn(options_.name, ": ", options_.server.url, " answers nothing (", last_problem_,
                  "); the run ends if that lasts for ", minutes, " minutes");
  }

  void end_outage() {
    silent_since_.reset();
    if (!says_again_) return;
    says_again_.reset();
    end_of_outage_ = last_answer_;
    logging::info(options_.name, ": ", options_.server.url, " answers again");
  }

  std::string problem(const HttpAnswer& answer) const {
    if (!answer.error.empty()) return without_secrets(answer.error);
    if (!answer.location.empty())
      return str("HTTP ", answer.status, ": a redirect to ",
                 excerpt(without_secrets(answer.location), 80), ", which is not followed");
    return str("HTTP ", answer.status,
               answer.body.empty() ? "" : ": " + excerpt(without_secrets(answer.body), 160, 80));
  }

  std::string without_secrets(std::string text) const {
    for (const std::string& secret : secrets_) text = replaced(text, secret, "***");
    return text;
  }

  Clock::duration seconds(double count) const {
    return std::chrono::duration_cast<Clock::duration>(count * options_.second);
  }

  const HttpPoolOptions options_;
  std::vector<std::string> secrets_;
  const std::unique_ptr<HttpClient> client_;

  // Used by the thread only.
  std::map<int64_t, Tried> active_;                  // Request::number -> a request as sent
  std::multimap<Clock::time_point, Tried> waiting_;  // when it is due -> a request
  size_t num_together_ = 0;  // the most that were unanswered at a time, since there were none
  std::optional<Clock::time_point> last_answer_, end_of_outage_;
  std::optional<Clock::time_point> silent_since_;  // the first failure after the last answer
  std::optional<Clock::time_point> says_again_;    // set during an outage that was said
  std::string last_problem_;
};

}  // namespace

void ServerConfig::visit(ConfigVisitor& v) {
  v.field("url", url, "http, judge: where the server is asked, http://HOST:PORT/PATH or https://");
  v.field("headers_env", headers_env,
          "http, judge: headers whose values have ${NAME} for a variable of the environment, as in "
          "{Authorization: \"Bearer ${JUDGE_KEY}\"}");
  v.field("ca_file", ca_file,
          "http, judge: PEM file of the authority to trust; empty: the system's");
  v.field("proxy", proxy, "http, judge: URL of a proxy; empty: none, whatever http_proxy says");
  v.field("retries", retries,
          "http, judge: further tries of a request that is not answered, after 1, 2, 4, ... 60 s",
          {.min = 0, .max = 1000});
  v.field("outage_minutes", outage_minutes,
          "http, judge: minutes without any answer until the run is saved and ends",
          {.min = 1e-3, .max = 1e6});
}

std::vector<std::string> ServerConfig::variables() const {
  std::vector<std::string> out;
  for (const auto& [name, value] : headers_env) {
    const size_t before = out.size();
    split_value(
        value, [](const std::string&) {}, [&](const std::string& it) { out.push_back(it); });
    if (name.empty() || std::ranges::find(out, "") != out.end() ||
        name.find_first_of(" \t\r\n:") != name.npos || value.find_first_of("\r\n") != value.npos)
      throw InputError(str("headers_env: ", excerpt(name), " is no header"));
    if (out.size() == before)
      throw InputError(str("headers_env.", name,
                           ": has no ${NAME}; hint: keys come from the "
                           "environment, since the configuration is written to the run"));
  }
  return out;
}

const ServerConfig& ServerConfig::validate() const {
  if (url.empty())
    throw InputError("url: needs the server's address; hint: url: http://127.0.0.1:8000/PATH");
  const bool stays_here = is_loopback(host_of(url)) && proxy.empty();
  if (!proxy.empty()) host_of(proxy, "proxy");
  if (!variables().empty() && !url.starts_with("https://") && !stays_here)
    throw InputError(str("url: a key of headers_env would be sent in the clear to ", excerpt(url),
                         "; hint: https://, or a server on this machine"));
  return *this;
}

std::unique_ptr<RequestPool> make_http_pool(HttpPoolOptions options) {
  options.server.validate();
  return std::make_unique<HttpPool>(std::move(options));
}

}  // namespace cohort
