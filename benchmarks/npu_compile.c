/* Compiles an OpenVINO model for a device and writes the blob, with the openvino_c.dll beside it:

     npu_compile.exe MODEL.xml WEIGHTS.bin DEVICE OUT.blob [PROPERTY=VALUE ...]

   It prints one line, "ok" or "failed WHAT: why", and is built and run by npu_compile.py. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

typedef int (*create_t)(void **core);
typedef int (*set_property_t)(void *core, const char *device, ...);
typedef int (*read_model_t)(void *core, const char *model, const char *weights, void **read);
typedef int (*compile_model_t)(void *core, void *model, const char *device, size_t count, void **compiled, ...);
typedef int (*export_model_t)(void *compiled, const char *file);
typedef const char *(*last_error_t)(void);

static HMODULE library;
static last_error_t last_error;

static void *named(const char *name) {
  void *found = (void *)GetProcAddress(library, name);
  if (found == NULL) {
    printf("failed load: openvino_c.dll has no %s\n", name);
    exit(2);
  }
  return found;
}

static void check(const char *what, int status) {
  if (status == 0) return;
  char said[4096];
  strncpy(said, last_error(), sizeof said - 1);
  said[sizeof said - 1] = 0;
  for (char *at = said; *at; at++)
    if (*at == '\n' || *at == '\r') *at = ' ';
  printf("failed %s: status %d: %s\n", what, status, said);
  exit(1);
}

int main(int count, char **given) {
  if (count < 5) {
    printf("failed start: model, weights, device and output are needed\n");
    return 2;
  }
  library = LoadLibraryA("openvino_c.dll");
  if (library == NULL) {
    printf("failed load: openvino_c.dll, error %lu\n", GetLastError());
    return 2;
  }
  last_error = (last_error_t)named("ov_get_last_err_msg");
  create_t create = (create_t)named("ov_core_create");
  set_property_t set_property = (set_property_t)named("ov_core_set_property");
  read_model_t read_model = (read_model_t)named("ov_core_read_model");
  compile_model_t compile_model = (compile_model_t)named("ov_core_compile_model");
  export_model_t export_model = (export_model_t)named("ov_compiled_model_export_model");

  void *core = NULL, *model = NULL, *compiled = NULL;
  check("start", create(&core));
  for (int i = 5; i < count; i++) {
    char *value = strchr(given[i], '=');
    if (value == NULL) {
      printf("failed start: %s is no PROPERTY=VALUE\n", given[i]);
      return 2;
    }
    *value++ = 0;
    check(given[i], set_property(core, given[3], given[i], value));
  }
  check("read", read_model(core, given[1], given[2], &model));
  check("compile", compile_model(core, model, given[3], 0, &compiled));
  check("export", export_model(compiled, given[4]));
  printf("ok\n");
  return 0;
}
