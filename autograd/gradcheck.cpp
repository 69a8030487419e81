#include "autograd/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "core/rng.h"

namespace cohort {
namespace {

using Fn = std::function<Variable(std::span<const Variable>)>;

std::vector<double> random_values(int64_t n, uint64_t seed, uint64_t stream) {
  Rng rng(seed, rng_stream(kGradcheckPurpose, 1, stream));
  std::vector<double> values(static_cast<size_t>(n));
  for (double& v : values) v = rng.normal();
  return values;
}

// The scalar under test and its analytic gradients.
class Subject {
 public:
  Subject(const Fn& fn, const std::vector<Tensor>& inputs, uint64_t seed) : fn_(fn), seed_(seed) {
    for (const Tensor& input : inputs) {
      COHORT_CHECK(input.dtype() == DType::kF64, "[gradcheck] expected f64 inputs, got ",
                   input.str());
      values_.push_back(input.clone());
    }
  }

  std::vector<std::vector<double>> gradients() {
    std::vector<Variable> leaves;
    for (const Tensor& value : values_) leaves.push_back(Variable::parameter(value.clone()));
    const Variable y = fn_(leaves);
    COHORT_CHECK(y.requires_grad(),
                 "[gradcheck] the result does not depend on the inputs through the tape");
    const Shape shape = y.shape();
    weights_ = random_values(shape.numel(), seed_, 0);
    backward(y, Tensor::from(weights_, shape));
    std::vector<std::vector<double>> out;
    for (const Variable& leaf : leaves) out.push_back(leaf.grad().to_vector<double>());
    return out;
  }

  double value() const {
    NoGradGuard guard;
    std::vector<Variable> constants;
    for (const Tensor& v : values_) constants.emplace_back(v.clone());
    const std::vector<double> y = fn_(constants).value().to_vector<double>();
    double total = 0;
    for (size_t i = 0; i < y.size(); ++i) total += weights_[i] * y[i];
    return total;
  }

  // d value / dt at t = 0, where move(t) displaces the inputs: fourth-order central difference.
  template <class F>
  double difference(double h, F&& move) const {
    const auto at = [&](double t) {
      move(t);
      const double v = value();
      move(-t);
      return v;
    };
    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
  }

  std::vector<Tensor>& values() { return values_; }

 private:
  const Fn& fn_;
  uint64_t seed_;
  std::vector<Tensor> values_;
  std::vector<double> weights_;
};

void record(GradcheckResult& result, double analytic, double numeric, double tolerance,
            const std::string& where) {
  const double error = std::abs(analytic - numeric) / tolerance;
  result.checks += 1;
  if (!(error > result.worst) && !std::isnan(error)) return;
  result.worst = std::isnan(error) ? INFINITY : error;
  result.ok = result.worst <= 1;
  std::ostringstream text;
  text.precision(12);
  text << where << ": analytic " << analytic << ", numeric " << numeric << ", error "
       << result.worst << " of the tolerance";
  result.message = text.str();
}

}  // namespace

GradcheckResult gradcheck(const Fn& fn, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options) {
  Subject subject(fn, inputs, options.seed);
  const auto gradients = subject.gradients();
  double largest = 0;
  for (const auto& g : gradients)
    for (const double v : g) largest = std::max(largest, std::abs(v));
  const auto tolerance = [&](double a, double n, double scale) {
    return options.relative * std::max(std::abs(a), std::abs(n)) + options.absolute * scale +
           1e-300;
  };

  GradcheckResult result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t n = inputs[i].numel();
    Rng rng(options.seed, rng_stream(kGradcheckPurpose, 2, i));
    for (int64_t k = 0; k < std::min(n, options.elements); ++k) {
      const int64_t e = n <= options.elements ? k : rng.below(n);
      double* element = subject.values()[i].data<double>() + e;
      const double x = *element;
      const double numeric =
          subject.difference(options.step * std::max(1.0, std::abs(x)), [&](double t) {
            *element = *element == x ? x + t : x;  // every second call restores the exact value
          });
      const double analytic = gradients[i][static_cast<size_t>(e)];
      record(result, analytic, numeric, tolerance(analytic, numeric, largest),
             str("input ", i, " element ", e));
    }
  }

  for (int64_t d = 0; d < options.directions; ++d) {
    std::vector<std::vector<double>> direction, start;
    double analytic = 0, scale = 0, length = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      direction.push_back(random_values(inputs[i].numel(), options.seed,
                                        1000 + 100 * static_cast<uint64_t>(d) + i));
      start.push_back(inputs[i].to_vector<double>());
      for (size_t e = 0; e < direction[i].size(); ++e) {
        analytic += direction[i][e] * gradients[i][e];
        scale += std::abs(direction[i][e] * gradients[i][e]);
        length = std::hypot(length, direction[i][e]);
      }
    }
    // The displacement of all elements together stays small.
    const double step = options.step / std::max(4.0, length / 2);
    bool moved = false;
    const double numeric = subject.difference(step, [&](double t) {
      moved = !moved;
      for (size_t i = 0; i < inputs.size(); ++i) {
        double* values = subject.values()[i].data<double>();
        for (size_t e = 0; e < start[i].size(); ++e)
          values[e] = moved ? start[i][e] + t * direction[i][e] : start[i][e];
      }
    });
    record(result, analytic, numeric, tolerance(analytic, numeric, std::max(largest, scale)),
           str("direction ", d));
  }
  return result;
}

}  // namespace cohort
