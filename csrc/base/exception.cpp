#include "base/exception.h"

#include <c10/util/Exception.h>

namespace torchrpc {

Error errorFromException(
    const std::exception_ptr& raised, ErrorCode code, const std::string& worker, const std::string& context) {
  try {
    std::rethrow_exception(raised);
  } catch (const Error& error) {
    return Error(error.code(), context + error.text(), error.worker(), error.detail()).withOrigin(error.origin());
  } catch (const c10::Error& error) {
    return {code, context + error.what_without_backtrace(), worker};
  } catch (const std::exception& error) {
    return {code, context + error.what(), worker};
  } catch (...) {
    return {code, context + "unknown exception", worker};
  }
}

}  // namespace torchrpc
