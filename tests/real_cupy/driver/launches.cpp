#include "launches.h"

#include <malloc.h>

#include <cstring>

namespace gpuless {
namespace {

std::set<Module*> modules;

// Arguments as the kernel will find them: copied when it is launched, each as aligned as any parameter can be.
struct Arguments {
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines;
  std::vector<size_t> offsets, sizes;

  void add(const void* value, size_t size) {
    offsets.push_back(sizeof(Line) * lines.size()), sizes.push_back(size);
    lines.resize(lines.size() + (size + sizeof(Line) - 1) / sizeof(Line));
    memcpy((char*)lines.data() + offsets.back(), value, size);
  }
  const char* at(size_t offset) const { return (const char*)lines.data() + offset; }
};

Error refuse_sizes(const Function& function, const Launch& how) {
  const size_t threads = how.block.product();
  const bool grid_fits = how.grid.product() && how.grid.x <= 2147483647u && how.grid.y <= 65535 && how.grid.z <= 65535;
  if (!grid_fits || !threads || threads > 1024 || how.block.z > 64) return cudaErrorInvalidValue;
  if (threads > (size_t)function.entry.most_threads) return cudaErrorLaunchOutOfResources;
  return int(how.shared) > function.most_dynamic_shared ? cudaErrorInvalidValue : cudaSuccess;
}

// A caller's vector of pointers has no length; malloc knows about how long it is.
Error refuse_count(const Function& function, void** arguments) {
  const size_t wanted = function.entry.parameters.size();
  if (!arguments || !wanted) return wanted ? cudaErrorInvalidValue : cudaSuccess;
  const size_t room = malloc_usable_size((void*)arguments) / sizeof(void*);
  if (room >= wanted && room <= wanted + 4) return cudaSuccess;
  fault("%s: about %zu arguments for %zu parameters", function.entry.name.c_str(), room, wanted);
  return cudaErrorInvalidValue;
}

// Eight bytes that are an address of another device's memory, in an argument of whatever type: tables travel by value.
Error refuse_foreign_memory(const Function& function, const Arguments& given, int device) {
  for (size_t i = 0; i < given.sizes.size(); ++i)
    for (size_t at = 0; at + 8 <= given.sizes[i]; at += 8) {
      uintptr_t word;
      memcpy(&word, given.at(given.offsets[i] + at), 8);
      const Allocation* found = allocation_of((void*)word);
      if (!found || found->kind != DEVICE || found->device == device) continue;
      fault("%s on device %d: argument %zu has an address in device %d's memory", function.entry.name.c_str(), device, i,
            found->device);
      return cudaErrorInvalidValue;
    }
  return cudaSuccess;
}

}  // namespace

Runner& runner() {
  static Runner it = nullptr;
  return it;
}

Module* load(const char* ptx) {
  static size_t number = 0;
  auto* made = new Module{++number, ptx, current_device(), {}};
  for (Entry& entry : entries_of(made->image)) {
    made->functions.push_back(std::make_unique<Function>());
    made->functions.back()->module = made;
    made->functions.back()->entry = std::move(entry);
  }
  modules.insert(made);
  return made;
}

bool is_loaded(const Module* module) { return modules.count((Module*)module); }

void unload(Module* module) {
  modules.erase(module);
  delete module;
}

Function* function_of(CUfunction handle) {
  for (Module* module : modules)
    for (auto& function : module->functions)
      if (function.get() == (Function*)handle) return function.get();
  return nullptr;
}

Error launch(Function* function, const Launch& how, Stream* stream, void** arguments) {
  if (settings().idle) return cudaSuccess;
  const std::string name = function->entry.name;
  const int device = current_device();
  if (const Error error = refuse_if_lost(device)) return error;
  if (!stream || stream->device != device || function->module->device != device) {
    fault("%s, loaded on device %d, launched on a stream of device %d while %d is current", name.c_str(),
          function->module->device, stream ? stream->device : -1, device);
    return cudaErrorInvalidResourceHandle;
  }
  if (Error error = refuse_sizes(*function, how)) return error;
  if (Error error = refuse_count(*function, arguments)) return error;
  auto given = std::make_shared<Arguments>();
  for (size_t i = 0; i < function->entry.parameters.size(); ++i)
    given->add(arguments[i], function->entry.parameters[i].size);
  if (Error error = refuse_foreign_memory(*function, *given, device)) return error;
  tell(LAUNCH, name.c_str());
  const size_t module = function->module->number;
  auto image = std::make_shared<std::string>(function->module->image);  // a module may be unloaded while it works
  return queue(stream, name, [=] {
    const Call call = {module, image->c_str(), name.c_str(), how, given->at(0), sizeof(Arguments::Line) * given->lines.size(),
                       given->offsets.data(), given->sizes.data(), given->sizes.size()};
    return (Error)runner()(&call);
  });
}

}  // namespace gpuless
