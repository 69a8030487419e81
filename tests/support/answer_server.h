// A running tests/support/answer_server.py.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "sys/files.h"
#include "sys/process.h"
#include "tests/support/test_util.h"
#include "text/json.h"

namespace cohort::test {

class AnswerServer {
 public:
  // `port` 0: any. `tls`: it has a certificate for localhost, in ca_file().
  explicit AnswerServer(int port = 0, bool tls = false);
  ~AnswerServer();
  AnswerServer(const AnswerServer&) = delete;
  AnswerServer& operator=(const AnswerServer&) = delete;

  int port() const { return port_; }
  std::string url(const std::string& path, const std::string& host = "127.0.0.1") const;
  std::string ca_file() const { return dir_.path("certificate.pem"); }
  std::vector<Json> requests() const;  // so far

 private:
  TempDir dir_;
  bool tls_;
  int port_ = 0, id_ = -1;
};

inline AnswerServer::AnswerServer(int port, bool tls) : tls_(tls) {
  std::vector<std::string> command = {"env", str("ANSWER_PORT=", port), "python3",
                                      COHORT_TESTS "/support/answer_server.py", dir_.path("")};
  if (tls) {
    const std::string make =
        str("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext ",
            "subjectAltName=DNS:localhost -keyout '", dir_.path("key.pem"), "' -out '", ca_file(),
            "' 2>/dev/null");
    EXPECT_EQ(std::system(make.c_str()), 0);
    command.insert(command.end(), {ca_file(), dir_.path("key.pem")});
  }
  const Spawned spawned = spawn({.command = command, .environment = {}, .directory = ""});
  EXPECT_EQ(spawned.error, 0);
  id_ = spawned.id;
  for (int i = 0; i < 2000 && !path_exists(dir_.path("port")); ++i) ::usleep(10000);
  port_ = std::stoi(read_text_file(dir_.path("port")));
}

inline AnswerServer::~AnswerServer() {
  ::kill(id_, SIGKILL);
  wait_for_exit(id_);
}

inline std::string AnswerServer::url(const std::string& path, const std::string& host) const {
  std::string quoted;
  for (const char c : path) {
    char text[4] = {c};
    if (c <= ' ' || c == '"' || c == '`' || c == '{' || c == '}')
      std::snprintf(text, 4, "%%%02x", c);
    quoted += text;
  }
  return str(tls_ ? "https://" : "http://", host, ":", port_, "/", quoted);
}

inline std::vector<Json> AnswerServer::requests() const {
  std::vector<Json> out;
  if (!path_exists(dir_.path("requests"))) return out;
  const std::string text = read_text_file(dir_.path("requests"));
  std::istringstream lines(text.substr(0, text.rfind('\n') + 1));  // it may write another one
  for (std::string line; std::getline(lines, line);) out.push_back(parse_json(line, "requests"));
  return out;
}

}  // namespace cohort::test
