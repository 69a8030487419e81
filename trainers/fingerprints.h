// Fingerprints (kernels/fingerprint.h) of weights and optimizer state, which ranks compare without
// exchanging or copying the tensors.
#pragma once

#include <string>
#include <vector>

#include "trainers/shards.h"

namespace cohort {

// The sum of a tensor, or of this rank's part of one: the sums of all parts add up to the whole
// one's, modulo 2^64.
struct Fingerprint {
  std::string name;
  int64_t sum = 0;
};

// A part of a parameter, or of state that belongs to it: the suffix of its name, and the values.
struct FingerprintSource {
  std::string suffix;
  Tensor values;
  ParameterPart part;
};

// Returns that of each source, whose addresses follow from the flat index of its part. Synchronizes
// with the set's device.
std::vector<Fingerprint> fingerprints(const ParameterSet& set,
                                      const std::vector<FingerprintSource>& sources);
// Returns that of each trained parameter.
std::vector<Fingerprint> weight_fingerprints(const ParameterSet& set);

// "rank 1 has other NAME than rank 0", of the first of `all` that is not the same on every rank; ""
// if there is none, or only one rank. Every rank calls it with the same names, and gets the same.
std::string first_difference(Communicator& comm, const std::vector<Fingerprint>& all);

}  // namespace cohort
