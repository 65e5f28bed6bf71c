// What the text of a PTX module says of its kernels: parameters and limits. Its code is not looked at.
#pragma once
#include <string>
#include <vector>

namespace gpuless {

struct Parameter {
  size_t size = 0;
  bool is_pointer = false;
};

struct Entry {
  std::string name;
  std::vector<Parameter> parameters;
  int most_threads = 1024;
  int shared = 0;  // bytes, static
};

std::vector<Entry> entries_of(const std::string& ptx);

}  // namespace gpuless
