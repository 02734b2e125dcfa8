// The fake driver's modules and launches: an image is a shared object that kshim.h made of a .cu file.
#include <dlfcn.h>

#include <map>

#include "streams.h"

// What kshim.h's KERNEL_EXPORT makes of a kernel: NAME__launch_packed(Launch*, arguments, bytes).
struct Launch {
  unsigned grid[3], block[3], smem;
  int order;
  uint64_t seed, switches;
  char err[512];
};
using LaunchFunction = int (*)(Launch*, char*, size_t);

namespace {
struct Function {
  LaunchFunction launch = nullptr;
  std::string name;
  int most_shared = 48 << 10;
};
struct Module {
  void* library;
  std::map<std::string, Function> functions;
};
struct Shape {
  unsigned grid[3], block[3], shared;
};

// Kernels run their threads in another order in each mode.
void run_kernel(const Function& function, const Shape& shape, std::string& arguments) {
  Launch launch{{shape.grid[0], shape.grid[1], shape.grid[2]},
                {shape.block[0], shape.block[1], shape.block[2]},
                shape.shared,
                (int)state.mode,
                state.mode == RANDOM ? random_number() : 0,
                0,
                {0}};
  if (function.launch(&launch, &arguments[0], arguments.size())) {
    say("%s: %s", function.name.c_str(), launch.err);
    count(counted::kernel_errors);
    state.sticky = LAUNCH_FAILED;
  }
}

int add_module(void** module, void* library) {
  *module = new Module{library, {}};
  count(counted::modules);
  return OK;
}

int load_module(void** module, const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    say("%s", dlerror());
    return INVALID_IMAGE;
  }
  return add_module(module, library);
}
}  // namespace

API int cuModuleLoad(void** module, const char* path) {
  IN_CONTEXT;
  return load_module(module, path);
}
API int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void**) {
  IN_CONTEXT;
  NOT_IN_CAPTURE("cuModuleLoad");
  const char* p = (const char*)image;
  if (memcmp(p, "\177ELF", 4)) return INVALID_IMAGE;
  uint64_t sections;  // of the ELF header: the table of sections ends a shared object
  uint16_t each, number;
  memcpy(&sections, p + 40, 8);
  memcpy(&each, p + 58, 2);
  memcpy(&number, p + 60, 2);
  // An image that was loaded before is the same library: each has stacks of its own, two mappings a thread of a block, and a
  // process may have 65,530 mappings.
  static std::map<std::string, void*> loaded;
  const size_t all = sections + (size_t)each * number;
  void*& library = loaded[std::string(p, all)];
  if (library) return add_module(module, library);
  const char* folder = getenv("TMPDIR");
  std::string path = std::string(folder ? folder : "/tmp") + "/kernels-XXXXXX";  // dlopen knows old libraries by their name
  int file = mkstemp(&path[0]);
  bool written = file >= 0 && write(file, p, all) == (ssize_t)all;
  close(file);
  int result = written ? load_module(module, path.c_str()) : INVALID_IMAGE;
  unlink(path.c_str());
  if (result == OK) library = ((Module*)*module)->library;
  return result;
}
API int cuModuleLoadData(void** module, const void* image) { return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr); }
API int cuModuleUnload(void* module) {
  LOCKED;
  drain_all();
  delete (Module*)module;  // the library stays: functions may be pending in graphs
  count(counted::modules, -1);
  return OK;
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  IN_CONTEXT;
  auto* m = (Module*)module;
  void* symbol = dlsym(m->library, (std::string(name) + "__launch_packed").c_str());
  if (!symbol) return NOT_FOUND;
  Function& found = m->functions[name];
  found.launch = (LaunchFunction)symbol;
  found.name = name;
  return *function = &found, OK;
}
API int cuFuncSetBlockShape(void*, int, int, int) { return OK; }
API int cuFuncSetAttribute(Function* function, int attribute, int value) {
  LOCKED;
  if (attribute != 8) return OK;  // the most dynamic shared memory
  if (value > MOST_SHARED) return INVALID_VALUE;
  return function->most_shared = value, OK;
}
API int cuFuncGetAttribute(int* value, int attribute, Function* function) {
  return *value = attribute == 0 ? 1024 : attribute == 8 ? function->most_shared : 0, OK;
}
API int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void* stream, void** params, void** extra) {
  IN_CONTEXT;
  if (params || !extra || (int)shared > function->most_shared || !gx || !gy || !gz || gy > 65535 || gz > 65535 ||
      !bx || !by || !bz || bx * by * bz > 1024)
    return INVALID_VALUE;
  const char* data = nullptr;
  size_t bytes = 0;
  for (void** e = extra; *e; e += 2) {
    if (*e == (void*)1) data = (const char*)e[1];        // CU_LAUNCH_PARAM_BUFFER_POINTER
    if (*e == (void*)2) bytes = *(const size_t*)e[1];    // CU_LAUNCH_PARAM_BUFFER_SIZE
  }
  count(counted::launches);
  Shape shape{{gx, gy, gz}, {bx, by, bz}, shared};
  Op op{[function = *function, shape, arguments = std::string(data, bytes)]() mutable { run_kernel(function, shape, arguments); }};
  op.is_kernel = true;
  return submit(stream_of(stream), std::move(op));
}
