#pragma once

// Includes ATen's IValue, which defines macros with common names: CHECK, LOG and others. If the program has defined one
// of them before, its own definition stays. Otherwise that of c10 remains, because headers of torch that the program
// may include later use it.

#ifdef CHECK
#define TORCHRPC_PROGRAM_HAS_CHECK
#pragma push_macro("CHECK")
#undef CHECK
#endif
#ifdef DCHECK
#define TORCHRPC_PROGRAM_HAS_DCHECK
#pragma push_macro("DCHECK")
#undef DCHECK
#endif
#ifdef DLOG
#define TORCHRPC_PROGRAM_HAS_DLOG
#pragma push_macro("DLOG")
#undef DLOG
#endif
#ifdef FATAL_IF
#define TORCHRPC_PROGRAM_HAS_FATAL_IF
#pragma push_macro("FATAL_IF")
#undef FATAL_IF
#endif
#ifdef LOG
#define TORCHRPC_PROGRAM_HAS_LOG
#pragma push_macro("LOG")
#undef LOG
#endif
#ifdef LOG_IF
#define TORCHRPC_PROGRAM_HAS_LOG_IF
#pragma push_macro("LOG_IF")
#undef LOG_IF
#endif
#ifdef VLOG
#define TORCHRPC_PROGRAM_HAS_VLOG
#pragma push_macro("VLOG")
#undef VLOG
#endif
#ifdef VLOG_IF
#define TORCHRPC_PROGRAM_HAS_VLOG_IF
#pragma push_macro("VLOG_IF")
#undef VLOG_IF
#endif
#ifdef VLOG_IS_ON
#define TORCHRPC_PROGRAM_HAS_VLOG_IS_ON
#pragma push_macro("VLOG_IS_ON")
#undef VLOG_IS_ON
#endif

#include <ATen/core/ivalue.h>  // IWYU pragma: export

#ifdef TORCHRPC_PROGRAM_HAS_CHECK
#undef TORCHRPC_PROGRAM_HAS_CHECK
#pragma pop_macro("CHECK")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_DCHECK
#undef TORCHRPC_PROGRAM_HAS_DCHECK
#pragma pop_macro("DCHECK")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_DLOG
#undef TORCHRPC_PROGRAM_HAS_DLOG
#pragma pop_macro("DLOG")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_FATAL_IF
#undef TORCHRPC_PROGRAM_HAS_FATAL_IF
#pragma pop_macro("FATAL_IF")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_LOG
#undef TORCHRPC_PROGRAM_HAS_LOG
#pragma pop_macro("LOG")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_LOG_IF
#undef TORCHRPC_PROGRAM_HAS_LOG_IF
#pragma pop_macro("LOG_IF")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_VLOG
#undef TORCHRPC_PROGRAM_HAS_VLOG
#pragma pop_macro("VLOG")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_VLOG_IF
#undef TORCHRPC_PROGRAM_HAS_VLOG_IF
#pragma pop_macro("VLOG_IF")
#endif
#ifdef TORCHRPC_PROGRAM_HAS_VLOG_IS_ON
#undef TORCHRPC_PROGRAM_HAS_VLOG_IS_ON
#pragma pop_macro("VLOG_IS_ON")
#endif
