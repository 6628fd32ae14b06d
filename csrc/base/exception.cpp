#include "base/exception.h"

#include <c10/util/Exception.h>

#include <cxxabi.h>
#include <typeinfo>

#include "base/demangle.h"

namespace torchrpc {

std::string textOf(const std::exception& exception) {
  const auto* const of_c10 = dynamic_cast<const c10::Error*>(&exception);
  return of_c10 ? of_c10->what_without_backtrace() : exception.what();
}

Error errorFromException(
    const std::exception_ptr& raised, ErrorCode code, const std::string& worker, const std::string& context) {
  try {
    std::rethrow_exception(raised);
  } catch (const Error& error) {
    return Error(error.code(), context + error.text(), error.worker(), error.detail())
        .withOrigin(error.origin())
        .withExceptionType(error.exceptionType());
  } catch (const std::exception& error) {
    return Error(code, context + textOf(error), worker).withExceptionType(demangledName(typeid(error)));
  } catch (...) {
    const auto* const type = abi::__cxa_current_exception_type();
    const auto name = type ? demangledName(*type) : std::string("unknown type");
    return Error(code, context + "an exception of type " + name, worker).withExceptionType(name);
  }
}

}  // namespace torchrpc
