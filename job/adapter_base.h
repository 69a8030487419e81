// The base model of an adapter: its folder, and whether it is the one of the training.
#pragma once

#include <string>

#include "nn/adapter_folder.h"

namespace cohort {

struct AdapterBase {
  std::string path;         // absolute, of the folder with the base's weights; empty: no adapter
  std::string fingerprint;  // base_fingerprint(); empty: not known
};

// Checksum over the names and contents of the model's weight files, and over the fields of its
// config.json that may change what it computes. Reads all of them.
std::string base_fingerprint(const std::string& dir);

// The base of the adapter in the folder `dir`: `given` unless empty, else what a checkpoint has
// recorded, also if its run's directory has moved with both, else base_model_name_or_path, which
// counts from the current folder. The fingerprint is the recorded one. Throws InputError, with the
// next step, for a folder without a model, one that is an adapter itself, and names of the Hugging
// Face Hub.
AdapterBase find_base(const std::string& dir, const AdapterConfig& adapter,
                      const std::string& given);

// Computes base.fingerprint. Throws InputError if it was known and differs: another base would make
// another model of the adapter in `dir`.
void verify_base(AdapterBase& base, const std::string& dir);

// Makes `model`, which has the adapter of `dir` if `is_adapter`, one with the adapters of `wanted`.
// Throws InputError naming the key unless an adapter has the rank, alpha, scale and targets of
// `wanted`.
void apply_adapters(const LoraConfig& wanted, ModelConfig& model, bool is_adapter,
                    const std::string& dir);

}  // namespace cohort
