#include "ptx.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace gpuless {
namespace {

// The words of a PTX text, one after the other; comments are none.
class Words {
 public:
  explicit Words(const std::string& text) : at_(text.c_str()) { next(); }

  const std::string& word() const { return word_; }  // "" at the end
  bool is(const char* wanted) const { return word_ == wanted; }
  bool is_over() const { return word_.empty(); }
  std::string take() {
    std::string taken = word_;
    next();
    return taken;
  }
  bool take_if(const char* wanted) {
    if (!is(wanted)) return false;
    next();
    return true;
  }

 private:
  void next() {
    word_.clear();
    skip_space();
    if (!*at_) return;
    if (strchr(MARKS, *at_)) {
      word_ = *at_++;
      return;
    }
    while (*at_ && !isspace((unsigned char)*at_) && !strchr(MARKS, *at_)) word_ += *at_++;
  }
  void skip_space() {
    for (;;) {
      while (isspace((unsigned char)*at_)) ++at_;
      if (strncmp(at_, "//", 2)) return;
      while (*at_ && *at_ != '\n') ++at_;
    }
  }

  static constexpr const char* MARKS = "(){}[],;=";
  const char* at_;
  std::string word_;
};

// ".b8" is 1 byte, ".u64" 8, ".pred" 1; no type is 0.
size_t size_of_type(const std::string& type) {
  const size_t digits = type.find_first_of("0123456789");
  if (type[0] != '.' || digits == std::string::npos) return 0;
  return std::max(1, atoi(type.c_str() + digits) / 8);
}

// .param .align 8 .b8 name[64]   or   .param .u64 .ptr .global .align 16 name
Parameter parameter(Words& words) {
  Parameter found;
  for (; !words.is_over() && !words.is(",") && !words.is(")"); words.take()) {
    if (words.is(".ptr")) found.is_pointer = true;
    if (words.is(".align")) words.take();  // and its number, in the loop
    else if (const size_t size = size_of_type(words.word())) found.size = size;
    else if (words.is("[")) words.take(), found.size *= atoi(words.word().c_str());
  }
  return found;
}

std::vector<Parameter> parameters(Words& words) {
  std::vector<Parameter> found;
  if (!words.take_if("(")) return found;
  while (!words.is_over() && !words.take_if(")")) {
    found.push_back(parameter(words));
    words.take_if(",");
  }
  if (!found.empty() && !found.back().size) found.pop_back();  // "()"
  return found;
}

// .maxntid 256, 1, 1
int most_threads(Words& words) {
  int threads = 1;
  do threads *= atoi(words.take().c_str());
  while (words.take_if(","));
  return std::min(1024, threads);
}

// .shared .align 4 .b8 name[1024]
int shared_bytes(Words& words) {
  size_t size = 0;
  for (; !words.is_over() && !words.is(";"); words.take()) {
    if (words.is(".align")) words.take();
    else if (const size_t of_type = size_of_type(words.word())) size = of_type;
    else if (words.is("[")) words.take(), size *= atoi(words.word().c_str());
  }
  return int(size);
}

Entry entry(Words& words) {
  Entry found;
  found.name = words.take();
  found.parameters = parameters(words);
  int depth = 0;
  do {
    if (words.is(";") && !depth) break;  // declared only
    if (words.is("{")) ++depth;
    if (words.is("}") && --depth == 0) break;
    const std::string word = words.take();
    if (word == ".maxntid") found.most_threads = most_threads(words);
    if (word == ".shared" && depth) found.shared += shared_bytes(words);
  } while (!words.is_over());
  return found;
}

}  // namespace

std::vector<Entry> entries_of(const std::string& ptx) {
  std::vector<Entry> found;
  for (Words words(ptx); !words.is_over();)
    if (words.take() == ".entry") found.push_back(entry(words));
  return found;
}

}  // namespace gpuless
