// A library for LD_PRELOAD under which a process believes that its CPU has no vector instructions beyond AVX2 and FMA.
//
// Linux can make the instruction CPUID fault (arch_prctl(2), ARCH_CPUID), which threads and forked processes inherit. The
// handler answers in its place, with those features left out; sigaction(2) gives nobody else that signal. Code that was
// compiled for a fixed CPU is not affected.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_CPUID = 0x1012, LEAF_FEATURES = 7 };

static long allow_cpuid(int allowed) { return syscall(SYS_arch_prctl, ARCH_CPUID, allowed); }

typedef int SetAction(int, const struct sigaction*, struct sigaction*);

static int set_action(int number, const struct sigaction* action, struct sigaction* before) {
  return ((SetAction*)dlsym(RTLD_NEXT, "sigaction"))(number, action, before);
}

// Instead of the C library's: a process that would catch SIGSEGV itself, to say where it ended, does not.
int sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  return set_action(number, number == SIGSEGV ? NULL : action, before);
}

static unsigned bits(const int* numbers, int count) {
  unsigned mask = 0;
  for (int i = 0; i < count; ++i) mask |= 1u << numbers[i];
  return mask;
}

// Intel SDM, volume 2, CPUID, leaf 07H.
static void leave_out(unsigned subleaf, unsigned* eax, unsigned* ebx, unsigned* ecx, unsigned* edx) {
  static const int in_ebx[] = {16, 17, 21, 26, 27, 28, 30, 31};  // AVX512 F, DQ, IFMA, PF, ER, CD, BW, VL
  static const int in_ecx[] = {1, 6, 11, 12, 14};                // AVX512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
  static const int in_edx[] = {2, 3, 8, 22, 23, 24, 25};         // AVX512 4VNNIW, 4FMAPS, VP2INTERSECT, FP16; AMX BF16, TILE, INT8
  if (subleaf == 0) {
    *ebx &= ~bits(in_ebx, sizeof in_ebx / sizeof *in_ebx);
    *ecx &= ~bits(in_ecx, sizeof in_ecx / sizeof *in_ecx);
    *edx &= ~bits(in_edx, sizeof in_edx / sizeof *in_edx);
  } else {
    *eax = *ebx = *ecx = *edx = 0;  // AVX-VNNI, AVX512 BF16, AMX FP16 and later
  }
}

static void on_fault(int number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)registers[REG_RIP];
  if (code[0] != 0x0f || code[1] != 0xa2) {  // not CPUID: a fault of the program's own, which comes again
    const struct sigaction plain = {.sa_handler = SIG_DFL};
    set_action(number, &plain, NULL);
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
  unsigned eax, ebx, ecx, edx;
  allow_cpuid(1);
  __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  allow_cpuid(0);
  if (leaf == LEAF_FEATURES) leave_out(subleaf, &eax, &ebx, &ecx, &edx);
  registers[REG_RAX] = eax;
  registers[REG_RBX] = ebx;
  registers[REG_RCX] = ecx;
  registers[REG_RDX] = edx;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  if (set_action(SIGSEGV, &action, NULL) != 0 || allow_cpuid(0) != 0) {
    static const char message[] = "error: this kernel or CPU cannot hide instruction sets from a process\n";
    (void)!write(2, message, sizeof message - 1);
    _exit(1);
  }
}
