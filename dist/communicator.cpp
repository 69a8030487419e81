// The communicator of a run with one rank: every collective is a copy or nothing. It checks its
// arguments like the others, so that a mistake shows before the first run with two ranks.
#include "dist/communicator.h"

#include "dist/collective_args.h"

namespace cohort {
namespace {

class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

  void all_reduce(Tensor& t, Reduce) override {
    detail::check_collective_tensor("all_reduce", "t", t);
    detail::check_reducible("all_reduce", t);
  }
  void broadcast(Tensor& t, int root) override {
    detail::check_collective_tensor("broadcast", "t", t);
    detail::check_root(root, 1);
  }
  void all_gather(Tensor& out, const Tensor& in) override {
    detail::check_parts("all_gather", out, in, 0, 1);
    out.reshape(in.shape()).copy_(in);
  }
  void reduce_scatter(Tensor& out, const Tensor& in) override {
    detail::check_parts("reduce_scatter", in, out, 0, 1);
    detail::check_reducible("reduce_scatter", in);
    out.reshape(in.shape()).copy_(in);
  }
  void barrier() override {}
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator() {
  return std::make_unique<SingleCommunicator>();
}

}  // namespace cohort
