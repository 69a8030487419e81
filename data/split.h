// Which problems are held out: a property of the prompt alone, so that no seed, order or duplicate
// can carry a prompt across the border.
#pragma once

#include <string_view>

namespace cohort {

// True for about `fraction` of all prompts: those whose hash, seen as a number in [0, 1), is below
// it. The same on every platform and in every version.
bool is_held_out(std::string_view prompt, double fraction);

}  // namespace cohort
