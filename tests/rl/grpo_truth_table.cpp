// The check of each published case, or why there is none. A case of a feature that is not offered
// is checked partly if our functions give some of its numbers: the check computes the rest, and the
// row states what that is.
#include "tests/rl/grpo_truth.h"

namespace cohort::test {
namespace {

constexpr Coverage kWhole = Coverage::kWhole, kPart = Coverage::kPart, kNone = Coverage::kNone;

constexpr char kSequenceWeight[] = "GSPO with a product of importance weights";
constexpr char kLoo[] = "baseline = reward - advantage; the std of the others is not offered";

}  // namespace

const std::vector<TruthCase>& truth_table() {
  static const std::vector<TruthCase> table = {
      {"kl_k1", kWhole, "k1", check_kl},
      {"kl_k1_clamped", kPart, "k1 itself; the check caps it at the case's output clamp", check_kl},
      {"kl_k2", kWhole, "k2", check_kl},
      {"kl_k3_clamped", kPart, "k3 itself; the check caps it at the case's output clamp", check_kl},
      {"kl_penalty_loss", kWhole, "loss with beta", check_kl_penalty},
      {"kl_grad_with_sampling_term_plain", kWhole, "gradient of the unbiased k3",
       check_kl_gradient},
      {"ppo_clip_rollout_correction", kWhole, "importance weights of tokens",
       check_rollout_weights},
      {"tis_token_cap_0.8", kWhole, "importance weights of tokens", check_rollout_weights},
      {"icepop_0.5_5", kWhole, "importance weights of tokens", check_rollout_weights},
      {"tis_bounds_min_None", kWhole, "truncated importance weights", check_given_weights},
      {"gspo_rollout_correction", kWhole, kSequenceWeight, check_sequence_ratio},
      {"gspo_tis_cap_0.8", kWhole, kSequenceWeight, check_sequence_ratio},
      {"gspo_b2", kWhole, "GSPO with grpo weights", check_sequence_ratio},
      {"dual_clip_c3", kWhole, "dual clip", check_dual_clip},
      {"dual_clip_slime", kWhole, "dual clip", check_dual_clip},
      {"cispo_slime_wide", kWhole, "CISPO: values, gradients and clipped tokens", check_cispo},
      {"entropy_approx", kNone,
       "no estimate from samples: the head gives the exact entropy (its own tests)", nullptr},
      {"loo_baseline_basic", kPart, kLoo, check_leave_one_out},
      {"loo_baseline_single", kPart, kLoo, check_leave_one_out},
      {"loo_baseline_identical", kPart, kLoo, check_leave_one_out},
      {"loo_baseline_mixed_sizes", kPart, kLoo, check_leave_one_out},
      {"loo_baseline_invalid_sample", kPart,
       "valid samples; the invalid one gets advantage 0 here, not a baseline of its own",
       check_leave_one_out},
      {"loo_baseline_extreme", kWhole, "baseline = reward - advantage", check_leave_one_out},
      {"grpo_adv_zero_std_group", kWhole, "group_advantages", check_group_advantages},
      {"grpo_adv_small_std", kPart,
       "group_advantages; the check undoes the 1e-4 added to the std, which the case lacks",
       check_group_advantages_without_floor},
      {"maxrl_none", kWhole, "group_advantages: zeros in every scale", check_equal_rewards},
      {"maxrl_all", kWhole, "group_advantages: zeros in every scale", check_equal_rewards},
      {"masked_mean", kWhole, "grpo weights of one sequence", check_masked_mean},
      {"ppo_clip_high", kWhole, "clip", check_clip},
      {"agg_token_mean_dp", kWhole,
       "dapo weights; ranks add, so the case's mean is divided by the ranks",
       check_token_mean_of_ranks},
      {"agg_seq_mean_token_mean_dp", kWhole, "grpo weights", check_sequence_mean},
      {"agg_excludes_fully_masked", kWhole, "grpo weights; the masked sequence is left out",
       check_sequence_mean},
      {"agg_grad_accum", kWhole, "dapo weights over micro batches",
       check_token_mean_of_micro_batches},
      {"agg_token_sum_dp4", kPart,
       "the sum over tokens is dr_grpo's numerator; the check undoes its constant denominator",
       check_token_sum},
      {"policy_loss_b3_token_mean", kWhole, "clip with dapo weights, whole and split",
       check_token_mean},
      {"dapo_overlong", kPart,
       "overlong up to max_length; beyond it, where the case's penalty still grows and ours is "
       "constant as TRL's, the check adds the rest",
       check_overlong_added},
      {"trl_soft_overlong_110", kWhole, "overlong", check_overlong},
      {"repetition_55555_2", kWhole, "repetition", check_repetition},
      {"repetition_121212_2", kWhole, "repetition", check_repetition},
      {"repetition_12_3", kWhole, "repetition", check_repetition},
      {"repetition_123_3", kWhole, "repetition", check_repetition},
      {"repetition__3", kWhole, "repetition", check_repetition},
      {"repetition_123123_2", kWhole, "repetition", check_repetition},
      {"repetition_123123_3", kWhole, "repetition", check_repetition},
      {"cosine_25_1", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_75_1", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_25_0", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_75_0", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_50_1", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_50_0", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_0_1", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_100_1", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_100_0", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_200_1", kWhole, "cosine with exact_match", check_cosine},
      {"cosine_200_0", kWhole, "cosine with exact_match", check_cosine},
      {"off_policy_mask", kWhole, "off_policy_mask", check_off_policy_mask},
      {"entropy_quantile_mask_0", kWhole, "top_entropy_quantile", check_entropy_mask},
      {"entropy_quantile_mask_1", kWhole, "top_entropy_quantile", check_entropy_mask},
      {"entropy_quantile_mask_2", kWhole, "top_entropy_quantile", check_entropy_mask},
      {"entropy_quantile_mask_3", kWhole, "top_entropy_quantile", check_entropy_mask},
      {"nll_right", kWhole, "token_log_probs", check_nll},
      {"nll_wrong", kWhole, "token_log_probs", check_nll},
  };
  return table;
}

}  // namespace cohort::test
