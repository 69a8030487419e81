// Every generated task: solvable, deterministic, split without overlap. Iterates the task table.
#include <set>
#include <string>

#include "data/example.h"
#include "data/split.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

// Small enough that training and held-out problems would collide without the split.
TaskConfig small_sizes(const Task& task) {
  return {.min_size = task.min_size, .max_size = task.min_size + 2};
}

TEST(Tasks, CheckersAcceptEverySolution) {
  for (const Task* task : tasks()) {
    for (const TaskConfig config :
         {small_sizes(*task), TaskConfig{task->max_size, task->max_size}}) {
      const auto set = make_task_set(*task, config, Split::kTrain, 1, 0);
      for (int64_t i = 0; i < 300; ++i) {
        const Example e = set->get(i);
        ASSERT_EQ(task->check(e, e.solution), 1) << task->name << ": " << e.prompt << e.solution;
        ASSERT_EQ(task->check(e, " " + e.solution + "\n"), 1) << task->name;
        ASSERT_TRUE(e.fields.is_object());
      }
    }
  }
}

TEST(Tasks, CheckersRejectCorruptedSolutions) {
  for (const Task* task : tasks()) {
    const auto set = make_task_set(*task, small_sizes(*task), Split::kTrain, 2, 0);
    for (int64_t i = 0; i < 300; ++i) {
      const Example e = set->get(i);
      // The last character carries part of every answer: a wrong one, one too many, none at all.
      std::string wrong = e.solution;
      wrong.back() = wrong.back() == '1' ? '2' : '1';
      const std::string problem = str(task->name, ": ", e.prompt, e.solution);
      ASSERT_EQ(task->check(e, wrong), 0) << problem;
      ASSERT_EQ(task->check(e, e.solution + e.solution.back()), 0) << problem;
      ASSERT_EQ(task->check(e, e.solution + " and more"), 0) << problem;
      ASSERT_EQ(task->check(e, ""), 0) << problem;
      ASSERT_EQ(task->check(e, "\xff\0{"), 0) << problem;
      ASSERT_EQ(task->check(e, std::string(100000, '(')), 0) << problem;
    }
  }
}

TEST(Tasks, AlphabetCoversPromptsAndSolutionsAndEveryCharacterIsUsed) {
  for (const Task* task : tasks()) {
    const TaskConfig config{.min_size = task->min_size, .max_size = task->min_size + 4};
    const auto set = make_task_set(*task, config, Split::kTrain, 3, 0);
    std::set<char> used;
    for (int64_t i = 0; i < 2000; ++i) {
      const Example e = set->get(i);
      for (const char c : e.prompt + e.solution) used.insert(c);
    }
    const std::string_view alphabet = task->alphabet;
    EXPECT_EQ(used, std::set<char>(alphabet.begin(), alphabet.end())) << task->name;
  }
}

TEST(Tasks, ProblemsDependOnSeedAndIndexOnly) {
  for (const Task* task : tasks()) {
    const TaskConfig config{.min_size = task->min_size + 1, .max_size = task->min_size + 3};
    const auto a = make_task_set(*task, config, Split::kTrain, 4, 0);
    const auto b = make_task_set(*task, config, Split::kTrain, 4, 0);
    const auto c = make_task_set(*task, config, Split::kTrain, 5, 0);
    EXPECT_EQ(a->size(), INT64_MAX);
    int same = 0;
    for (int64_t i = 50; i >= 0; --i) {
      const Example e = a->get(i);
      EXPECT_EQ(e.prompt, b->get(i).prompt);
      EXPECT_EQ(e.solution, b->get(i).solution);
      same += e.prompt == c->get(i).prompt;
    }
    EXPECT_LT(same, 26) << task->name;  // few problems exist, so some prompts do coincide
  }
}

TEST(Tasks, SplitsAreDisjoint) {
  for (const Task* task : tasks()) {
    const TaskConfig config{.min_size = task->min_size, .max_size = task->min_size + 4};
    constexpr int64_t kHeldOut = 5;
    const auto held_out = make_task_set(*task, config, Split::kHeldOut, 9, kHeldOut);
    ASSERT_EQ(held_out->size(), kHeldOut);
    std::set<std::string> prompts;
    for (int64_t i = 0; i < kHeldOut; ++i) prompts.insert(held_out->get(i).prompt);
    EXPECT_EQ(prompts.size(), static_cast<size_t>(kHeldOut)) << task->name;
    const auto train = make_task_set(*task, config, Split::kTrain, 9, 0);
    for (int64_t i = 0; i < 2000; ++i) {
      const std::string prompt = train->get(i).prompt;
      ASSERT_FALSE(prompts.contains(prompt)) << task->name << ": " << prompt;
      ASSERT_FALSE(is_held_out(train->id(i).split, 0.1));
    }
  }
}

// A countdown problem with permuted numbers is the same problem.
TEST(Tasks, PermutedCountdownProblemsAreInTheSameSplit) {
  const auto sorted = [](const Example& example) {
    std::vector<int64_t> numbers;
    for (const Json& n : example.fields.at("numbers").as_array()) numbers.push_back(n.as_int());
    std::sort(numbers.begin(), numbers.end());
    numbers.push_back(example.fields.at("target").as_int());
    return numbers;
  };
  const Task& task = find_task("countdown");
  const TaskConfig two{.min_size = 2, .max_size = 2};  // few enough to repeat
  const auto held_out = make_task_set(task, two, Split::kHeldOut, 0, 1500);
  std::set<std::vector<int64_t>> problems;
  for (int64_t i = 0; i < held_out->size(); ++i) problems.insert(sorted(held_out->get(i)));
  const auto train = make_task_set(task, two, Split::kTrain, 1, 0);
  for (int64_t i = 0; i < 20000; ++i)
    ASSERT_FALSE(problems.contains(sorted(train->get(i)))) << train->get(i).prompt;
}

TEST(Tasks, ALargerHeldOutSetStartsWithTheSmallerOne) {
  const Task& task = find_task("addition");
  const auto few = make_task_set(task, {}, Split::kHeldOut, 7, 20);
  const auto many = make_task_set(task, {}, Split::kHeldOut, 7, 200);
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(few->get(i).prompt, many->get(i).prompt);
  EXPECT_THROW_WITH(few->get(20), Error, "index 20 of 20");
}

TEST(Tasks, TooFewProblemsIsAnErrorThatSaysHowMany) {
  // Two-bit strings: four prompts, so the held-out tenth has none or few of them.
  const Task& parity = find_task("parity");
  EXPECT_THROW_WITH(make_task_set(parity, {2, 4}, Split::kHeldOut, 1, 28), InputError,
                    "task parity: asked for 28 held-out problems of sizes 2 to 4, but only ");
  // All 26 strings of one letter: the split must find exactly those below the threshold.
  const Task& reverse = find_task("reverse");
  int64_t exist = 0;
  for (char c = 'a'; c <= 'z'; ++c) exist += is_held_out(split_hash(str(c, '>')), 0.1);
  ASSERT_GT(exist, 0);
  EXPECT_EQ(make_task_set(reverse, {1, 1}, Split::kHeldOut, 1, exist)->size(), exist);
  EXPECT_THROW_WITH(make_task_set(reverse, {1, 1}, Split::kHeldOut, 1, exist + 1), InputError,
                    str("but only ", exist, " could be found; hint: "));
}

TEST(Tasks, ATaskWithoutTrainingProblemsIsAnError) {
  // A prompt from the held-out tenth, as the only problem of a task.
  const Task constant = {.name = "constant",
                         .description = "",
                         .alphabet = "0123456789",
                         .min_size = 1,
                         .max_size = 1,
                         .generate =
                             [](Rng&, const TaskConfig&) {
                               int i = 0;
                               while (!is_held_out(split_hash(std::to_string(i)), 0.1)) ++i;
                               return Example{.prompt = std::to_string(i)};
                             },
                         .check = [](const Example&, std::string_view) { return 0.0; }};
  EXPECT_THROW_WITH(make_task_set(constant, {1, 1}, Split::kTrain, 1, 0), InputError,
                    "task constant: every problem of sizes 1 to 1 is held out; hint: ");
}

TEST(Tasks, UnknownNamesAndSizesListTheKnownOnes) {
  EXPECT_THROW_WITH(find_task("additon"), InputError, "unknown task 'additon'; known: addition, ");
  for (const Task* task : tasks()) {
    EXPECT_EQ(&find_task(task->name), task);
    for (const TaskConfig config :
         {TaskConfig{task->min_size - 1, task->max_size}, TaskConfig{1, task->max_size + 1},
          TaskConfig{task->max_size, task->max_size - 1}})
      EXPECT_THROW_WITH(make_task_set(*task, config, Split::kTrain, 1, 1), InputError,
                        "are not possible; hint: ");
  }
}

TEST(Parity, GradesOnlyWhatFollowsTheLastColon) {
  const Task& task = find_task("parity");
  const Example e{.prompt = "101=", .answer = "0", .solution = "110:0"};
  EXPECT_EQ(task.check(e, "110:0"), 1);
  EXPECT_EQ(task.check(e, "nonsense:1:0"), 1);
  EXPECT_EQ(task.check(e, "110:1"), 0);
  EXPECT_EQ(task.check(e, "0"), 0);
  EXPECT_EQ(task.check(e, "110:"), 0);
}

// The last line is graded: after the result of the last call, a dialogue's turn has nothing else.
TEST(Arithmetic, GradesOnlyTheLastLine) {
  const Task& task = find_task("arithmetic");
  const Example e{.prompt = "(37+58)*41=", .answer = "3895"};
  EXPECT_EQ(task.check(e, "3895"), 1);
  EXPECT_EQ(task.check(e, "\n3895"), 1);
  EXPECT_EQ(task.check(e, "<<37+58>>95\n<<95*41>>3895\n3895"), 1);
  EXPECT_EQ(task.check(e, "<<95*41>>3895"), 0);
  EXPECT_EQ(task.check(e, "3895\n95"), 0);
  EXPECT_EQ(task.check(e, "-3895"), 0);
}

TEST(Arithmetic, WorkedSolutionsHaveALinePerOperatorInTheirShare) {
  const Task& task = find_task("arithmetic");
  int worked = 0;
  for (const int64_t size : {1, 2, 8}) {
    Rng rng(1, static_cast<uint64_t>(size));
    for (int i = 0; i < 300; ++i) {
      const Example e = task.generate(rng, {size, size, 0.5});
      const int64_t lines = std::count(e.solution.begin(), e.solution.end(), '\n');
      ASSERT_TRUE(lines == 0 || lines == size) << e.solution;
      worked += lines != 0;
      EXPECT_EQ(std::count(e.prompt.begin(), e.prompt.end(), '('), size - 1) << e.prompt;
      EXPECT_LT(std::abs(std::stoll(e.answer)), 1'000'000'000);
      EXPECT_EQ(lines == 0, e.solution == e.answer);
    }
  }
  EXPECT_NEAR(worked, 450, 75);  // binomial standard deviation 15, times 5
}

TEST(Tasks, ProblemsLookAsDocumented) {
  const TaskConfig two{.min_size = 2, .max_size = 2};
  Rng rng(1, 1);
  for (int i = 0; i < 200; ++i) {
    const Example sum = find_task("addition").generate(rng, two);
    ASSERT_EQ(sum.prompt.size(), 6u);
    EXPECT_EQ(std::stoi(sum.answer),
              std::stoi(sum.prompt.substr(0, 2)) + std::stoi(sum.prompt.substr(3, 2)));
    const Example reverse = find_task("reverse").generate(rng, two);
    EXPECT_EQ(reverse.prompt, str(reverse.answer[1], reverse.answer[0], ">"));
    const Example parity = find_task("parity").generate(rng, two);
    const int first = parity.prompt[0] - '0', second = parity.prompt[1] - '0';
    EXPECT_EQ(parity.solution, str(first, first ^ second, ":", first ^ second));
    const Example sort = find_task("sort").generate(rng, two);
    EXPECT_LE(sort.answer[0], sort.answer[1]);
  }
}

TEST(ChangedSet, GivesTheExamplesAtItsIndicesChanged) {
  const auto set = [](std::optional<std::vector<int64_t>> indices) {
    return make_changed_set(
        make_example_set({{.prompt = "a"}, {.prompt = "b"}, {.prompt = "c"}}),
        [](Example& example) { example.solution = example.prompt + "!"; }, std::move(indices));
  };
  const auto all = set(std::nullopt), some = set({{2, 0}});
  EXPECT_EQ(all->size(), 3);
  EXPECT_EQ(all->get(1).solution, "b!");
  ASSERT_EQ(some->size(), 2);
  EXPECT_EQ(some->get(0).solution, "c!");
  EXPECT_EQ(some->id(1).split, all->id(0).split);
  EXPECT_NE(some->id(1).split, all->id(1).split);
}

TEST(IsHeldOut, IsStableAndHoldsOutTheFraction) {
  // Values of this version: a change here would move problems between splits of finished runs.
  std::string picked;
  for (int i = 0; i < 100; ++i)
    if (is_held_out(split_hash(std::to_string(i)), 0.1)) picked += std::to_string(i) + " ";
  EXPECT_EQ(picked, "4 23 27 48 81 89 ");
  int count = 0;
  for (int i = 0; i < 20000; ++i) count += is_held_out(split_hash(str("prompt ", i)), 0.1);
  EXPECT_NEAR(count, 2000, 212);  // binomial standard deviation 42.4, times 5
  EXPECT_FALSE(is_held_out(split_hash("x"), 0));
  EXPECT_TRUE(is_held_out(split_hash("x"), 1));
}

}  // namespace
}  // namespace cohort
