#include "courier.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <stdexcept>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // where a socket option says it
#endif

namespace ridgeline {
namespace {

double steady_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void append_chunk(std::string& to, std::string_view head, std::string_view text, std::string_view tail) {
  static thread_local std::string body;
  body.assign(head);
  append_json(body, text);
  body.append(tail);
  char size[20];
  to.append(size, std::snprintf(size, sizeof size, "%zx\r\n", body.size()));
  to.append(body).append("\r\n");
}

}  // namespace

void append_json(std::string& to, std::string_view text) {
  static const char digits[] = "0123456789abcdef";
  to.push_back('"');
  size_t from = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = text[i];
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    to.append(text.substr(from, i - from));
    from = i + 1;
    to.push_back('\\');
    switch (c) {
      case '"': to.push_back('"'); break;
      case '\\': to.push_back('\\'); break;
      case '\b': to.push_back('b'); break;
      case '\t': to.push_back('t'); break;
      case '\n': to.push_back('n'); break;
      case '\f': to.push_back('f'); break;
      case '\r': to.push_back('r'); break;
      default:
        to.append("u00");
        to.push_back(digits[c >> 4]);
        to.push_back(digits[c & 15]);
    }
  }
  to.append(text.substr(from));
  to.push_back('"');
}

Observations::Observations(std::vector<double> upper)
    : bounds(std::move(upper)), counts(bounds.size() + 1, 0) {}

void Observations::observe(double value) {
  if (!(value > 0)) {  // what a clock's step made negative counts as nothing
    ++counts[0];
    return;
  }
  ++counts[std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin()];
  total += value;
}

void Observations::clear() {
  std::fill(counts.begin(), counts.end(), 0);
  total = 0;
}

Courier::Courier(double now_s, std::vector<double> publish_bounds, std::vector<double> gap_bounds)
    : offset_s_(now_s - steady_s()), publish_(std::move(publish_bounds)), gaps_(std::move(gap_bounds)) {
  if (::pipe(pipe_)) throw std::runtime_error("no pipe can be made");
  for (const int end : pipe_) {
    ::fcntl(end, F_SETFL, O_NONBLOCK);
    ::fcntl(end, F_SETFD, FD_CLOEXEC);
  }
  thread_ = std::thread([this] { run(); });
}

Courier::~Courier() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
  }
  due_.notify_one();
  thread_.join();
  for (const int end : pipe_) ::close(end);
}

std::shared_ptr<Errand> Courier::take(int descriptor, std::string_view opening, std::string_view head,
                                      std::string_view tail, int64_t interval) {
  auto errand = std::make_shared<Errand>();
  errand->descriptor = descriptor;
  errand->interval = interval;
  errand->head = head;
  errand->tail = tail;
  errand->buffer = opening;  // goes with the first token
  return errand;
}

bool Courier::add(const std::shared_ptr<Errand>& errand, std::string_view text, double at_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (errand->has_ended) return false;
  append_chunk(errand->buffer, errand->head, text, errand->tail);
  errand->at_s.push_back(at_s);
  const bool is_first = !errand->carried.num_tokens && !errand->is_sending;
  const bool is_due = is_first || static_cast<int64_t>(errand->at_s.size()) >= errand->interval;
  if (is_due && !errand->is_queued && !errand->is_stuck) {
    errand->is_queued = true;
    (is_first ? firsts_ : queue_).push_back(errand);
  }
  return true;
}

void Courier::go() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (firsts_.empty() && queue_.empty()) return;
    has_gone_ = true;
  }
  due_.notify_one();
}

std::string Courier::end(Errand& errand) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (errand.has_ended) return {};
  errand.has_ended = true;
  done_.wait(lock, [&] { return !errand.is_sending; });
  account(errand, errand.at_s);
  return errand.carried.num_tokens ? std::move(errand.buffer) : std::string();  // else only the opening
}

Carried Courier::seen(const Errand& errand) {
  std::lock_guard<std::mutex> lock(mutex_);
  return errand.carried;
}

bool Courier::is_stuck(const Errand& errand) {
  std::lock_guard<std::mutex> lock(mutex_);
  return errand.is_stuck && !errand.has_ended;
}

Courier::Counts Courier::drain() {
  std::lock_guard<std::mutex> lock(mutex_);
  Counts found{num_tokens_, publish_, gaps_};
  num_tokens_ = 0;
  publish_.clear();
  gaps_.clear();
  return found;
}

void Courier::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    due_.wait(lock, [&] { return is_over_ || has_gone_; });
    if (is_over_) return;
    has_gone_ = false;
    while (const std::shared_ptr<Errand> errand = next()) {
      errand->is_queued = false;
      if (!errand->has_ended) deliver(*errand, lock);
    }
  }
}

std::shared_ptr<Errand> Courier::next() {
  auto& from = firsts_.empty() ? queue_ : firsts_;
  if (from.empty()) return nullptr;
  std::shared_ptr<Errand> errand = std::move(from.front());
  from.pop_front();
  return errand;
}

void Courier::deliver(Errand& errand, std::unique_lock<std::mutex>& lock) {
  errand.out.clear();
  errand.out.swap(errand.buffer);
  errand.out_at_s.clear();
  errand.out_at_s.swap(errand.at_s);
  errand.is_sending = true;
  lock.unlock();
  ssize_t sent;
  do {
    sent = ::send(errand.descriptor, errand.out.data(), errand.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  lock.lock();
  account(errand, errand.out_at_s);
  if (sent < static_cast<ssize_t>(errand.out.size())) {
    errand.buffer.insert(0, errand.out, std::max<ssize_t>(sent, 0), std::string::npos);
    errand.is_stuck = true;
    const char mark = 0;
    if (::write(pipe_[1], &mark, 1) < 0) {  // full of marks: somebody will look
    }
  }
  errand.is_sending = false;
  if (errand.has_ended) done_.notify_all();
}

void Courier::account(Errand& errand, std::vector<double>& at_s) {
  const double now = now_s();
  Carried& carried = errand.carried;
  for (const double made_s : at_s) {
    publish_.observe(now - made_s);
    if (carried.num_tokens++) {
      gaps_.observe(now - carried.last_s);
    } else {
      carried.first_s = now;
    }
    carried.last_s = now;
    ++num_tokens_;
  }
  at_s.clear();
}

double Courier::now_s() const { return steady_s() + offset_s_; }

}  // namespace ridgeline
