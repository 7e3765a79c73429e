// Many small writes to many sockets with the interpreter's lock given up once.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cerrno>
#include <vector>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // where a socket option says it
#endif

namespace nb = nanobind;

namespace ridgeline {
namespace {

struct Piece {
  int descriptor;
  const char* data;
  size_t size;
};

long send_one(const Piece& piece) {
  ssize_t sent;
  do {
    sent = ::send(piece.descriptor, piece.data, piece.size, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? -static_cast<long>(errno) : static_cast<long>(sent);
}

// A tuple of (descriptor, bytes): it cannot change while the lock is not held.
std::vector<long> send_each(nb::tuple pairs) {
  std::vector<Piece> pieces;
  pieces.reserve(pairs.size());
  for (nb::handle each : pairs) {
    nb::tuple pair = nb::cast<nb::tuple>(each);
    nb::bytes data = nb::cast<nb::bytes>(pair[1]);
    pieces.push_back({nb::cast<int>(pair[0]), data.c_str(), data.size()});
  }
  std::vector<long> sent;
  sent.reserve(pieces.size());
  nb::gil_scoped_release release;
  for (const Piece& piece : pieces) sent.push_back(send_one(piece));
  return sent;
}

}  // namespace

void bind_sockets(nb::module_& m) {
  m.def("send_each", &send_each, nb::arg("pairs"),
        "Send to every (descriptor, bytes) what its socket takes now: bytes sent, or -errno.");
}

}  // namespace ridgeline
