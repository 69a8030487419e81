// Messages of failed checks, devices, streams and the log.
#include "core/check.h"

#include <fstream>
#include <functional>

#include "core/device.h"
#include "core/log.h"
#include "core/with_cuda.h"
#include "tests/support/test_util.h"

namespace cohort {

TEST(Check, MessageEndsWithFolderFileAndLine) {
  std::string message;
  const int line = __LINE__ + 2;
  try {
    COHORT_CHECK(1 + 1 == 3, "[op] expected ", 3, ", got ", 2.5);
  } catch (const Error& e) {
    message = e.what();
  }
  EXPECT_EQ(message, str("[op] expected 3, got 2.5 (core/check_test.cpp:", line, ")"));
}

TEST(Check, ArgumentsOfAPassingCheckAreNotEvaluated) {
  int evaluated = 0;
  COHORT_CHECK(true, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

TEST(Check, ConditionIsEvaluatedOnce) {
  int evaluated = 0;
  COHORT_CHECK(++evaluated > 0, "never");
  EXPECT_EQ(evaluated, 1);
}

TEST(Check, ShortPathsAreKept) {
  EXPECT_THROW_WITH(throw_check_error("x.cpp", 3, "m"), Error, "m (x.cpp:3)");
  EXPECT_THROW_WITH(throw_check_error("/x.cpp", 3, "m"), Error, "m (/x.cpp:3)");
  EXPECT_THROW_WITH(throw_check_error("/a/b/c/x.cpp", 3, "m"), Error, "m (c/x.cpp:3)");
}

TEST(Check, InputErrorIsAnError) {
  EXPECT_THROW(throw InputError("x"), Error);
}

TEST(Device, ParsesTheCpuAndRejectsOtherNames) {
  EXPECT_TRUE(parse_device("cpu", "device").is_cpu());
  EXPECT_EQ(parse_device("cpu", "device").str(), "cpu");
  EXPECT_EQ((Device{DeviceType::kCUDA, 3}).str(), "cuda:3");
  EXPECT_THROW_WITH(parse_device("cuda:99", "device"), InputError,
                    kWithCuda ? "'cuda:99' was asked for, but this machine has"
                              : "'cuda:99' was asked for, but this build");
  if (kWithCuda && cuda_device_count() == 0)
    EXPECT_THROW_WITH(parse_device("cuda", "device"), InputError, "0 usable CUDA devices (");
  for (const char* text : {"", "gpu", "CPU", "cpu:0", "cudax"})
    EXPECT_THROW_WITH(parse_device(text, "device"), InputError,
                      str("expected 'cpu', 'cuda' or 'cuda:N', got '", text, "'"));
  for (const char* text : {"cuda:", "cuda:x", "cuda:-1", "cuda:1x"})
    EXPECT_THROW_WITH(parse_device(text, "device"), InputError,
                      str("expected 'cpu', 'cuda' or 'cuda:N', got '", text, "'"));
}

TEST(Stream, GuardAppliesToItsDeviceAndRestoresThePreviousStream) {
  int outer_stream = 0, inner_stream = 0;
  EXPECT_EQ(current_stream({}).handle, nullptr);
  {
    const StreamGuard guard(Stream{Device::cuda(0), &outer_stream});
    EXPECT_EQ(current_stream(Device::cuda(0)).handle, &outer_stream);
    EXPECT_EQ(current_stream({}).handle, nullptr);
    {
      const StreamGuard inner(Stream{{}, nullptr});
      EXPECT_EQ(current_stream(Device::cuda(0)).handle, &outer_stream);
    }
    {
      const StreamGuard inner(Stream{Device::cuda(0), &inner_stream});
      EXPECT_EQ(current_stream(Device::cuda(0)).handle, &inner_stream);
    }
    {
      Stream prefetching = current_stream(Device::cuda(0));
      prefetching.may_prefetch = true;
      const StreamGuard inner(prefetching);
      EXPECT_EQ(current_stream(Device::cuda(0)).handle, &outer_stream);
      EXPECT_TRUE(current_stream(Device::cuda(0)).may_prefetch);
    }
    EXPECT_EQ(current_stream(Device::cuda(0)).handle, &outer_stream);
    EXPECT_FALSE(current_stream(Device::cuda(0)).may_prefetch);
  }
  EXPECT_TRUE(current_stream({}).device.is_cpu());
}

std::function<void(const std::string&)> append_to(const std::string& path) {
  return [path](const std::string& line) { std::ofstream(path, std::ios::app) << line; };
}

TEST(Log, FileReceivesEveryMessageAndAnExpectedWarningPasses) {
  const test::TempDir dir;
  logging::set_console_level(logging::Level::kError);
  logging::set_file(append_to(dir.path("log.txt")));
  {
    const test::ExpectLog expected("braces {} and 5");
    logging::write(logging::Level::kDebug, "quiet 1");
    logging::warn("braces {} and ", 5);
    logging::record("a {report}\n of two lines\n");
  }
  logging::set_file({});
  logging::info("after");
  logging::record("after");
  logging::set_console_level(logging::Level::kInfo);
  const std::string text = test::read_file(dir.path("log.txt"));
  EXPECT_NE(text.find("quiet 1"), std::string::npos);
  EXPECT_NE(text.find("braces {} and 5"), std::string::npos);
  EXPECT_TRUE(text.ends_with("info] a {report}\n of two lines\n")) << text;
  EXPECT_EQ(text.find("after"), std::string::npos);
}

TEST(Log, MessagesNeitherControlATerminalNorLookLikeOthers) {
  const test::TempDir dir;
  logging::set_console_level(logging::Level::kError);
  logging::set_file(append_to(dir.path("log.txt")));
  const std::string fake = "[2026-11-22 07:13:48.164 error] fake";
  logging::info("a\x1b[2J\xe2\x80\xae\x9b\n", fake, "\n  indented\n", fake);
  logging::record("b\r" + fake + "\x1b[A\n" + fake);
  logging::set_file({});
  logging::set_console_level(logging::Level::kInfo);
  const std::string text = test::read_file(dir.path("log.txt")), quoted = "\n    " + fake + "\n";
  EXPECT_NE(text.find("info] a\\x1b[2J\\u202e\\x9b" + quoted + "  indented" + quoted), text.npos)
      << text;
  EXPECT_NE(text.find("info] b\\x0d" + fake + "\\x1b[A" + quoted), text.npos) << text;
}

TEST(Log, AFailureToWriteTheFileIsPrintedEscaped) {
  testing::internal::CaptureStderr();
  logging::set_file([](const std::string&) { throw Error("cannot write \x1b[2J"); });
  logging::record("text");
  logging::set_file({});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "cohort: log: cannot write \\x1b[2J\n");
}

}  // namespace cohort
