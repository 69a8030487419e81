// One thread serves the pipes of all programs.
#include "rl/worker_pool.h"

#include <algorithm>
#include <deque>

#include "sys/polling.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kMaxAnswerBytes = 1 << 20;  // bytes beyond those of the request
// If so many first answers have timed out and no program has ever answered, none is expected to.
constexpr int kMaxUnanswered = 3;
// Time for a program that has closed a pipe, or whose input has ended, to end by itself.
constexpr std::chrono::milliseconds kEndPatience{1000};
constexpr const char* kFlushHint = "; does it flush its output after each line?";
constexpr const char* kTooLong = "its answer is over 1 MB";

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

class Loop final : public RequestPool {
 public:
  Loop(ProcessSpawner& spawner, WorkerPoolOptions options)
      : spawner_(spawner),
        options_(std::move(options)),
        workers_(static_cast<size_t>(options_.workers)),
        queues_(options_.key_of ? workers_.size() : 1) {
    for (Worker& worker : workers_) worker.program = spawner_.start(options_.program);
    start();
  }

  ~Loop() override {
    using std::chrono::milliseconds;
    RequestPool::end();
    for (Worker& worker : workers_) worker.program.input.close();
    const Clock::time_point deadline = Clock::now() + kEndPatience;
    try {
      for (Worker& worker : workers_)
        if (worker.program.id > 0)
          end(worker,
              std::max(milliseconds(), std::chrono::ceil<milliseconds>(deadline - Clock::now())));
    } catch (const Error&) {  // the spawner has ended, and all programs with it
    }
  }

 private:
  struct Sent : Request {
    Clock::time_point deadline = {};
    bool given_up = false;  // it was cancelled; a late answer is ignored
  };

  struct Worker {
    ProcessSpawner::Started program;
    int64_t answers = 0;         // since it was started
    std::vector<Sent> requests;  // without an answer, in the order in which they were sent
    std::string text, answer;    // the last request as sent, and the bytes received
    size_t sent_bytes = 0;       // prefix of `text`
    bool is_sending() const { return sent_bytes < text.size(); }
    bool is_idle() const { return std::ranges::all_of(requests, &Sent::given_up); }
  };

  void wake() override { wake_.signal(); }

  void serve(std::vector<Request> submitted, int64_t first) override {
    for (std::deque<Request>& queue : queues_)
      while (!queue.empty() && queue.front().number < first) queue.pop_front();
    for (Request& request : submitted)
      queues_[static_cast<size_t>(request.key.index) % queues_.size()].push_back(
          std::move(request));
    for (size_t i = 0; i < workers_.size(); ++i) {
      for (Sent& request : workers_[i].requests) request.given_up |= request.number < first;
      assign(workers_[i], queues_[i % queues_.size()]);
    }
    std::vector<pollfd> fds{{wake_.fd(), POLLIN, 0}};
    Clock::time_point deadline = Clock::now() + seconds(3600);
    for (const Worker& worker : workers_) {
      fds.push_back({worker.program.output.get(), POLLIN, 0});
      if (worker.is_sending()) fds.push_back({worker.program.input.get(), POLLOUT, 0});
      for (const Sent& request : worker.requests)
        if (!request.given_up) deadline = std::min(deadline, request.deadline);
    }
    poll_until(deadline, std::move(fds));
    wake_.clear();
    for (Worker& worker : workers_) {
      send(worker);
      receive(worker);
      check_deadlines(worker);
    }
  }

  // A program that has answered nothing for the time of an answer is not expected to.
  void check_deadlines(Worker& worker) {
    const auto is_late = [](const Sent& request) {
      return !request.given_up && Clock::now() >= request.deadline;
    };
    if (std::ranges::none_of(worker.requests, is_late)) return;
    num_timeouts_ += worker.answers == 0 && !any_answered_;
    fail(worker, worker.answers > 0 ? str("no answer in ", options_.timeout, " s")
                                    : str("no answer in ", options_.start_timeout,
                                          " s to its first request", kFlushHint));
  }

  // Begins to send the next request of the queue, if there is one and the program may have it.
  void assign(Worker& worker, std::deque<Request>& queue) {
    while (!queue.empty()) {
      const auto& all = worker.requests;
      if (worker.is_sending() || all.size() >= options_.concurrent ||
          std::ranges::count(all, queue.front().key, &Sent::key) > 0) {
        if (!worker.is_idle()) return;
        end(worker);  // the request would wait for answers that may never come
        worker = Worker();
      }
      Sent request{std::move(queue.front())};
      queue.pop_front();
      if (num_timeouts_ >= kMaxUnanswered) {
        finish(request, {"", str("no program has ever answered", kFlushHint)});
        continue;
      }
      try {
        if (worker.program.id < 0) worker.program = spawner_.start(options_.program);
      } catch (const InputError& e) {  // possibly temporary, since others were started
        finish(request, {"", e.what()});
        continue;
      }
      worker.text = request.line + '\n';
      worker.sent_bytes = 0;
      request.deadline =
          Clock::now() + seconds(worker.answers > 0 ? options_.timeout : options_.start_timeout);
      worker.requests.push_back(std::move(request));
    }
  }

  void send(Worker& worker) {
    if (!worker.is_sending()) return;
    const ssize_t n = ::write(worker.program.input.get(), worker.text.data() + worker.sent_bytes,
                              worker.text.size() - worker.sent_bytes);
    if (n > 0) worker.sent_bytes += static_cast<size_t>(n);
    if (n >= 0 || errno != EPIPE) return;
    while (receive(worker)) {  // what it had answered before
    }
    if (worker.is_sending()) fail(worker, "it has ended, or closed its input", kEndPatience);
  }

  // Returns true if it has read lines of the program, all of which are answers.
  bool receive(Worker& worker) {
    while (worker.program.output.is_open()) {
      std::string& answer = worker.answer;
      const size_t before = answer.size();
      const ssize_t n = read_available(worker.program.output.get(), answer);
      if (n == 0) return false;
      if (n < 0) return fail(worker, "it has ended, or closed its output", kEndPatience);
      size_t begin = 0;
      for (size_t end = before; (end = answer.find('\n', end)) != std::string::npos;) {
        const bool is_last = end + 1 == answer.size();
        const std::string error = take_line(worker, answer.substr(begin, end - begin), is_last);
        if (!error.empty()) return fail(worker, error);
        begin = ++end;
      }
      answer.erase(0, begin);
      size_t longest = 0;
      for (const Request& request : worker.requests)
        longest = std::max(longest, request.line.size());
      if (answer.size() > kMaxAnswerBytes + longest) return fail(worker, kTooLong);
      if (begin > 0) return true;
    }
    return false;
  }

  // Returns what is wrong with a line of a program; empty: it answers one of its requests.
  std::string take_line(Worker& worker, std::string line, bool is_last) {
    std::vector<Sent>& all = worker.requests;
    auto request = all.begin();
    if (!options_.key_of && !is_last) return "it wrote more than one line";
    try {
      if (options_.key_of) request = std::ranges::find(all, options_.key_of(line), &Sent::key);
    } catch (const InputError& e) {
      return e.what();
    }
    if (request == all.end() || (&*request == &all.back() && worker.is_sending()))
      return options_.key_of ? "it answers no request that it has: " + excerpt(line)
                             : "it wrote a line without a request";
    if (line.size() > kMaxAnswerBytes + request->line.size()) return kTooLong;
    if (!request->given_up && options_.validate)
      if (std::string error = options_.validate(request->line, line); !error.empty()) return error;
    ++worker.answers;
    any_answered_ = true;
    num_timeouts_ = 0;
    finish(*request, {std::move(line), ""});
    all.erase(request);
    for (Sent& other : all) other.deadline = Clock::now() + seconds(options_.timeout);
    return "";
  }

  // Kills the program and fails its requests; the next one starts a new program. Returns false.
  bool fail(Worker& worker, const std::string& error, std::chrono::milliseconds patience = {}) {
    const std::string how = end(worker, patience);
    for (const Request& request : worker.requests) finish(request, {"", str(error, " ", how)});
    worker = Worker();
    return false;
  }

  std::string end(Worker& worker, std::chrono::milliseconds patience = {}) {
    worker.program.input.close();
    worker.program.output.close();
    return spawner_.end(std::exchange(worker.program.id, -1), patience);
  }

  ProcessSpawner& spawner_;
  const WorkerPoolOptions options_;
  // Used by the thread only.
  std::vector<Worker> workers_;
  bool any_answered_ = false;
  int num_timeouts_ = 0;  // first answers that timed out while no program has answered
  // Requests that were not sent: per program, or one queue for all of them.
  std::vector<std::deque<Request>> queues_;
  WakeEvent wake_;
};

}  // namespace

std::unique_ptr<RequestPool> make_worker_pool(ProcessSpawner& spawner, WorkerPoolOptions options) {
  return std::make_unique<Loop>(spawner, std::move(options));
}

}  // namespace cohort
