/* Where the loader can pick the version of a function for the processor at hand. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
