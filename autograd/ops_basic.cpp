// Elementwise ops, sums, shapes, linear layers and embedding: forward and backward side by side.
#include <utility>

#include "autograd/ops.h"
#include "kernels/decode.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"

namespace cohort {

using kernels::Grad;
using kernels::Transpose;

Tensor empty_rows(const Tensor& x, int64_t columns, int64_t padding) {
  Shape shape = x.shape();
  shape[-1] = columns + padding;
  const Tensor all = Tensor::empty(shape, x.dtype(), x.device());
  return padding == 0 ? all : all.hide_padding(shape.rank() - 1, columns);
}

namespace {

// True for ops whose derivative reads their output; only these keep it.
template <class Op>
constexpr bool uses_output() {
  return requires {
    Op::kUsesOutput;
  };
}

}  // namespace

#define COHORT_DEFINE_UNARY(Op, name)                                                       \
  Variable name(const Variable& x) {                                                        \
    Tensor y = Tensor::empty_like(x.value());                                               \
    kernels::name##_forward({.y = y, .x = x.value()});                                      \
    const Tensor kept = uses_output<kernels::Op>() ? y : x.value();                         \
    return make_node(#name, y, {x}, [x = x.value(), kept](const Tensor& dy, Gradients& g) { \
      kernels::name##_backward({.dx = g.slot(0), .dy = dy, .x = x, .y = kept});             \
    });                                                                                     \
  }
COHORT_UNARY_OPS(COHORT_DEFINE_UNARY)
#undef COHORT_DEFINE_UNARY

namespace {

Variable binary(const char* name, void (*forward)(const kernels::BinaryForward&),
                void (*backward)(const kernels::BinaryBackward&), const Variable& a,
                const Variable& b) {
  Tensor y = Tensor::empty_like(a.value());
  forward({.y = y, .a = a.value(), .b = b.value()});
  return make_node(name, y, {a, b},
                   [backward, a = a.value(), b = b.value()](const Tensor& dy, Gradients& g) {
                     backward({.da = g.slot(0), .db = g.slot(1), .dy = dy, .a = a, .b = b});
                   });
}

}  // namespace

#define COHORT_DEFINE_BINARY(Op, name)                                             \
  Variable name(const Variable& a, const Variable& b) {                            \
    return binary(#name, kernels::name##_forward, kernels::name##_backward, a, b); \
  }
COHORT_DEFINE_BINARY(Sub, sub)
COHORT_DEFINE_BINARY(Mul, mul)
COHORT_DEFINE_BINARY(Div, div)
COHORT_DEFINE_BINARY(SigmoidGate, sigmoid_gate)
#undef COHORT_DEFINE_BINARY

namespace {

Variable gated(const char* name, void (*forward)(const kernels::GatedForward&),
               void (*backward)(const kernels::GatedBackward&), const Variable& x) {
  Tensor y = empty_rows(x.value(), x.shape()[-1] / 2);
  forward({.y = y, .x = x.value()});
  return make_node(name, y, {x}, [backward, x = x.value()](const Tensor& dy, Gradients& g) {
    backward({.dx = g.slot(0), .dy = dy, .x = x});
  });
}

}  // namespace

#define COHORT_DEFINE_GATED(Op, name)                                          \
  Variable name(const Variable& x) {                                           \
    return gated(#name, kernels::name##_forward, kernels::name##_backward, x); \
  }
COHORT_GATED_OPS(COHORT_DEFINE_GATED)
#undef COHORT_DEFINE_GATED

// Not a COHORT_DEFINE_BINARY because its backward needs no input values, and so keeps none alive.
Variable add(const Variable& a, const Variable& b) {
  Tensor y = Tensor::empty_like(a.value());
  kernels::add_forward({.y = y, .a = a.value(), .b = b.value()});
  return add_node(y, a, b);
}

Variable add_node(const Tensor& sum, const Variable& a, const Variable& b) {
  return make_node("add", sum, {a, b}, [](const Tensor& dy, Gradients& g) {
    g.pass(0, dy);
    g.pass(1, dy);
  });
}

Variable scale(const Variable& x, double factor) {
  Tensor y = Tensor::empty_like(x.value());
  kernels::scale({.y = y, .x = x.value(), .factor = factor});
  return make_node("scale", y, {x}, [factor](const Tensor& dy, Gradients& g) {
    GradSlot dx = g.slot(0);
    kernels::scale({.y = dx.tensor, .x = dy, .factor = factor, .mode = dx.mode});
  });
}

Variable sum(const Variable& x) {
  Tensor y = Tensor::empty({1}, accumulate_dtype(x.value().dtype()), x.value().device());
  kernels::sum({.y = y, .x = x.value()});
  return make_node("sum", y, {x}, [](const Tensor& dy, Gradients& g) {
    GradSlot dx = g.slot(0);
    kernels::broadcast_scalar({.x = dx.tensor, .value = dy, .mode = dx.mode});
  });
}

Variable weighted_sum(const Variable& x, const Tensor& weights) {
  return sum(mul(x, Variable(weights)));
}

Variable reshape(const Variable& x, const Shape& shape) {
  const Shape before = x.shape();
  return make_node("reshape", x.value().reshape(shape), {x},
                   [before](const Tensor& dy, Gradients& g) { g.pass(0, dy.reshape(before)); });
}

Variable select(const Variable& x, int64_t i) {
  return make_node("select", x.value().select(0, i).contiguous(), {x},
                   [i](const Tensor& dy, Gradients& g) {
                     GradSlot dx = g.slot(0);
                     if (dx.mode == Grad::kOverwrite) dx.tensor.zero_();
                     Tensor row = dx.tensor.select(0, i);
                     kernels::scale({.y = row, .x = dy, .factor = 1, .mode = Grad::kAccumulate});
                   });
}

namespace {

// Writes the gradients of parts of an input, of which the op does not use the others.
void write_parts(GradSlot dx, std::initializer_list<std::pair<Tensor, Tensor>> parts) {
  if (dx.mode == Grad::kOverwrite) dx.tensor.zero_();
  for (auto [part, sum] : parts) {
    if (dx.mode == Grad::kAccumulate) {
      const Tensor dy = sum.contiguous();
      sum = part.contiguous();
      kernels::scale({.y = sum, .x = dy, .factor = 1, .mode = Grad::kAccumulate});
    }
    part.copy_(sum);
  }
}

}  // namespace

Variable columns(const Variable& x, int64_t first, int64_t count) {
  return make_node("columns", x.value().narrow(1, first, count).contiguous(), {x},
                   [first, count](const Tensor& dy, Gradients& g) {
                     const GradSlot dx = g.slot(0);
                     write_parts(dx, {{dx.tensor.narrow(1, first, count), dy}});
                   });
}

GatedQkv split_gates(const Variable& x, int64_t heads, int64_t dim) {
  const int64_t tokens = x.shape()[0], width = heads * dim, rest = x.shape()[1] - 2 * width;
  // The columns of half of each query and gate, and those of keys and values.
  const auto half = [=](const Tensor& t, int64_t i) {
    return t.narrow(1, 0, 2 * width).reshape({tokens, heads, 2 * dim}).narrow(2, i * dim, dim);
  };
  const auto keys = [=](const Tensor& t) {
    return t.narrow(1, 2 * width, rest).reshape({tokens, rest / dim, dim});
  };
  const auto split = [=](const Tensor& t) {
    return std::array{t.narrow(1, 0, heads), t.narrow(1, heads, rest / dim)};
  };
  const Tensor qkv =
      Tensor::empty({tokens, heads + rest / dim, dim}, x.value().dtype(), x.value().device());
  auto parts = split(qkv);
  parts[0].copy_(half(x.value(), 0));
  parts[1].copy_(keys(x.value()));
  parts = {};
  return {make_node("qkv", qkv, {x},
                    [=](const Tensor& dy, Gradients& g) {
                      const GradSlot dx = g.slot(0);
                      const auto [queries, others] = split(dy);
                      write_parts(dx, {{half(dx.tensor, 0), queries}, {keys(dx.tensor), others}});
                    }),
          make_node("gates", half(x.value(), 1).contiguous().reshape({tokens, width}), {x},
                    [=](const Tensor& dy, Gradients& g) {
                      const GradSlot dx = g.slot(0);
                      write_parts(dx, {{half(dx.tensor, 1), dy.reshape({tokens, heads, dim})}});
                    })};
}

void linear_input_gradient(const Tensor& dy, const Tensor& w, GradSlot dx) {
  if (dx.tensor.defined())
    kernels::matmul({.c = dx.tensor, .a = dy, .b = w, .desc = {.out = dx.mode}});
}
void linear_weight_gradient(const Tensor& dy, const SavedTensor& x, GradSlot dw) {
  if (dw.tensor.defined())
    kernels::matmul(
        {.c = dw.tensor, .a = dy, .b = x.get(), .desc = {.a = Transpose::kYes, .out = dw.mode}});
}
void linear_bias_gradient(const Tensor& dy, GradSlot dbias) {
  if (dbias.tensor.defined()) kernels::bias_backward({.dbias = dbias, .dy = dy});
}

Variable linear(const Variable& x, const Variable& w, const Variable& bias) {
  Tensor y = empty_rows(x.value(), w.value().dim(0));
  kernels::linear_forward({.y = y, .x = x.value(), .w = w.value(), .bias = bias.value()});
  return make_node("linear", y, {x, w, bias},
                   [x = SavedTensor(x), w = w.value()](const Tensor& dy, Gradients& g) {
                     linear_input_gradient(dy, w, g.slot(0));
                     linear_weight_gradient(dy, x, g.weight_slot(1));
                     linear_bias_gradient(dy, g.weight_slot(2));
                   });
}

Variable select_rows(const Variable& x, const Tensor& rows) {
  const Shape shape = x.shape();
  if (rows.numel() == shape[0]) return x;
  Tensor y = Tensor::empty({rows.numel(), shape[1]}, x.value().dtype(), x.value().device());
  kernels::embedding_forward({.y = y, .table = x.value(), .ids = rows});
  return make_node("select_rows", y, {x}, [rows, shape](const Tensor& dy, Gradients& g) {
    Tensor dx = Tensor::zeros(shape, dy.dtype(), dy.device());
    kernels::set_rows({.t = dx, .at = rows, .rows = dy});
    g.pass(0, dx);
  });
}

Variable embedding(const Variable& table, const Tensor& ids, int64_t first_row) {
  const Tensor& all = table.value();
  const auto rows_of = [first_row](const Tensor& t) {
    return t.narrow(0, first_row, t.dim(0) - first_row);
  };
  Tensor y = Tensor::empty({ids.numel(), all.dim(1)}, all.dtype(), all.device());
  kernels::embedding_forward({.y = y, .table = rows_of(all), .ids = ids});
  return make_node("embedding", y, {table}, [=](const Tensor& dy, Gradients& g) {
    GradSlot dtable = g.weight_slot(0);
    if (first_row > 0 && dtable.mode == Grad::kOverwrite) {
      dtable.tensor.zero_();
      dtable.mode = Grad::kAccumulate;
    }
    Tensor rows = rows_of(dtable.tensor);
    kernels::embedding_backward({.dtable = {rows, dtable.mode}, .dy = dy, .ids = ids});
  });
}

Variable prepend_row(const Variable& row, const Variable& x, int64_t n) {
  const Tensor& xv = x.value();
  const int64_t groups = xv.dim(0) / n, cols = xv.dim(1);
  Tensor y = Tensor::empty({groups, n + 1, cols}, xv.dtype(), xv.device());
  y.narrow(1, 1, n).copy_(xv.reshape({groups, n, cols}));
  Tensor first = Tensor::empty({groups, cols}, xv.dtype(), xv.device());
  kernels::embedding_forward(
      {.y = first, .table = row.value(), .ids = Tensor::zeros({groups}, DType::kI32, xv.device())});
  y.select(1, 0).copy_(first);
  return make_node(
      "prepend_row", y.reshape({groups * (n + 1), cols}), {row, x},
      [=](const Tensor& dy, Gradients& g) {
        const Tensor d = dy.reshape({groups, n + 1, cols});
        if (GradSlot drow = g.weight_slot(0); drow.tensor.defined()) {
          Tensor sum = drow.tensor.reshape({cols});
          kernels::bias_backward({.dbias = {sum, drow.mode}, .dy = d.select(1, 0).contiguous()});
        }
        g.pass(1, d.narrow(1, 1, n).contiguous().reshape({groups * n, cols}));
      });
}

}  // namespace cohort
