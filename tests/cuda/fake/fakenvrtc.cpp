// A libnvrtc.so.13 for tests without a GPU: "compiles" a kernel file with compile_kernel.py, that is with g++ and kshim.h.
//
// So gpu_worker/device/nvrtc.py runs as it is, its cache included. The options are only looked at: what NVRTC would refuse
// is refused here.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {
enum { OK = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };

struct Program {
  std::string source, name, log, image;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}
void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

bool is_known(const char* option) {
  for (const char* known : {"--gpu-architecture=sm_", "--std=c++17", "--ptxas-options="})
    if (!strncmp(option, known, strlen(known))) return true;
  return false;
}
}  // namespace

API int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = MINOR, OK; }  // a hash of shim and flags
API const char* nvrtcGetErrorString(int result) {
  return result == OK ? "NVRTC_SUCCESS" : result == INVALID_OPTION ? "NVRTC_ERROR_INVALID_OPTION" : "NVRTC_ERROR_COMPILATION";
}
API int nvrtcGetNumSupportedArchs(int* n) { return *n = 3, OK; }
API int nvrtcGetSupportedArchs(int* archs) { return archs[0] = 80, archs[1] = 90, archs[2] = 100, OK; }
API int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers, const char** texts,
                           const char** names) {
  *program = new Program{source, name, "", "", {}};
  for (int i = 0; i < headers; ++i) (*program)->headers.push_back({names[i], texts[i]});
  return OK;
}
API int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, OK; }
API int nvrtcCompileProgram(Program* p, int count, const char** options) {
  for (int i = 0; i < count; ++i)
    if (!is_known(options[i])) return p->log = std::string("nvrtc: error: unknown option ") + options[i], INVALID_OPTION;
  const char* base = getenv("TMPDIR");
  std::string folder = std::string(base ? base : "/tmp") + "/fakenvrtc-XXXXXX";
  if (!mkdtemp(&folder[0])) return INVALID_INPUT;
  write(folder + "/" + p->name, p->source);
  for (auto& [name, text] : p->headers) write(folder + "/" + name, text);
  // its own environment: nothing of the fake cards
  std::string command = std::string("env -u PYTHONPATH -u LD_LIBRARY_PATH ") + PYTHON + " -m tests.cuda.fake.compile_kernel " + folder +
                        "/" + p->name + " " + folder + "/image";
  int status = system(("cd '" ROOT "' && " + command + " >" + folder + "/log 2>&1").c_str());
  p->log = read(folder + "/log");
  p->image = read(folder + "/image");
  if (system(("rm -rf '" + folder + "'").c_str())) return INVALID_INPUT;
  return status ? COMPILATION : OK;
}
API int nvrtcGetProgramLogSize(Program* p, size_t* bytes) { return *bytes = p->log.size() + 1, OK; }
API int nvrtcGetProgramLog(Program* p, char* text) { return memcpy(text, p->log.c_str(), p->log.size() + 1), OK; }
API int nvrtcGetCUBINSize(Program* p, size_t* bytes) { return *bytes = p->image.size(), OK; }
API int nvrtcGetCUBIN(Program* p, char* image) { return memcpy(image, p->image.data(), p->image.size()), OK; }
