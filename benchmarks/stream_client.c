// Load client of benchmarks/server.py: closed loops over keep-alive connections, on one thread.
//
// It waits (epoll), receives, counts `data: {` and records instants, and nothing else: its cost must
// be small next to the server's. On standard input: a line "PORT STREAMS REQUESTS", then per request
// a line "PAUSE_NS SIZE" and SIZE bytes that are sent as they are. PAUSE_NS is the pause between this
// request's response and the next request. On standard output: per request, in input order,
// "TTFT_NS EVENTS", then "all ELAPSED_NS CPU_NS".
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  char* bytes;
  size_t size;
  int64_t pause_ns, ttft_ns;
  long events;
} Request;

typedef struct {
  int fd;
  long request;        // index, or -1 during a pause
  int64_t began_ns, due_ns;
  long num_bytes;      // of this response
  long body_left;      // of a response with a length; -1 without
  char tail[8];        // the last bytes, for marks that are split between two reads
} Connection;

static const char MARK[] = "data: {", END[] = "0\r\n\r\n", LENGTH[] = "content-length: ";

static int64_t now_ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static int connected(int port) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
  const int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, (struct sockaddr*)&to, sizeof to)) fail("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

static void send_all(int fd, const char* bytes, size_t size) {
  while (size) {
    const ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
    if (sent < 0) fail("send");
    bytes += sent;
    size -= sent;
  }
}

// `due_ns`: when the request was due; 0: now.
static void begin(Connection* on, Request* requests, long index, int64_t due_ns) {
  on->request = index;
  on->num_bytes = 0;
  on->body_left = -1;
  memset(on->tail, 0, sizeof on->tail);
  on->began_ns = due_ns ? due_ns : now_ns(CLOCK_MONOTONIC);
  send_all(on->fd, requests[index].bytes, requests[index].size);
}

static long count_marks(const char* at, const char* end) {
  long count = 0;
  while ((at = memmem(at, end - at, MARK, sizeof MARK - 1))) {
    ++count;
    at += sizeof MARK - 1;
  }
  return count;
}

// Takes received bytes; 1 at the end of the response. `part` has room for the tail before it. TTFT is
// at the first event, or at the first byte of a response that is not streamed.
static int take(Connection* on, Request* request, char* part, ssize_t size) {
  if (!on->num_bytes) {
    char* head = memmem(part, size, "\r\n\r\n", 4);
    char* length = head ? memmem(part, head - part, LENGTH, sizeof LENGTH - 1) : NULL;
    if (length) {
      on->body_left = atol(length + sizeof LENGTH - 1) + (head + 4 - part);
      request->ttft_ns = now_ns(CLOCK_MONOTONIC) - on->began_ns;
    }
  }
  on->num_bytes += size;
  if (on->body_left >= 0) return (on->body_left -= size) <= 0;
  memcpy(part - sizeof on->tail, on->tail, sizeof on->tail);
  request->events += count_marks(part - (sizeof MARK - 2), part + size);  // no whole mark before it
  if (request->events && !request->ttft_ns) {
    request->ttft_ns = now_ns(CLOCK_MONOTONIC) - on->began_ns;
  }
  memcpy(on->tail, part + size - sizeof on->tail, sizeof on->tail);
  return !memcmp(on->tail + sizeof on->tail - 5, END, 5);
}

int main(void) {
  int port;
  long streams, num;
  if (scanf("%d %ld %ld", &port, &streams, &num) != 3) return 2;
  Request* requests = calloc(num, sizeof *requests);
  for (long i = 0; i < num; ++i) {
    if (scanf("%ld %zu", &requests[i].pause_ns, &requests[i].size) != 2) return 2;
    getchar();
    requests[i].bytes = malloc(requests[i].size);
    if (fread(requests[i].bytes, 1, requests[i].size, stdin) != requests[i].size) return 2;
  }
  if (streams > num) streams = num;
  Connection* all = calloc(streams, sizeof *all);
  const int watch = epoll_create1(0);
  for (long i = 0; i < streams; ++i) {
    all[i].fd = connected(port);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
    epoll_ctl(watch, EPOLL_CTL_ADD, all[i].fd, &event);
  }
  static char room[64 + (256 << 10)];
  char* const part = room + 64;
  long next = 0, left = num;
  const int64_t began_ns = now_ns(CLOCK_MONOTONIC), cpu_ns = now_ns(CLOCK_PROCESS_CPUTIME_ID);
  for (long i = 0; i < streams; ++i) begin(&all[i], requests, next++, 0);
  long num_paused = 0;
  while (left) {
    struct timespec wait = {0}, *until = NULL;
    if (num_paused) {
      const int64_t at_ns = now_ns(CLOCK_MONOTONIC);
      int64_t rest_ns = INT64_MAX;
      for (long i = 0; i < streams; ++i) {
        if (all[i].request >= 0 || !all[i].due_ns) continue;
        if (all[i].due_ns <= at_ns) {
          --num_paused;
          begin(&all[i], requests, next++, all[i].due_ns);
          all[i].due_ns = 0;
        } else if (all[i].due_ns - at_ns < rest_ns) {
          rest_ns = all[i].due_ns - at_ns;
        }
      }
      if (rest_ns != INT64_MAX) {  // in whole milliseconds, as asyncio waits
        const int64_t rest_ms = (rest_ns + 999999) / 1000000;
        wait.tv_sec = rest_ms / 1000;
        wait.tv_nsec = rest_ms % 1000 * 1000000;
        until = &wait;
      }
    }
    struct epoll_event ready[64];
    const int count = epoll_pwait2(watch, ready, 64, until, NULL);
    if (count < 0 && errno != EINTR) fail("epoll");
    for (int k = 0; k < count; ++k) {
      Connection* on = ready[k].data.ptr;
      const ssize_t size = recv(on->fd, part, 256 << 10, MSG_DONTWAIT);
      if (size < 0 && errno == EAGAIN) continue;
      if (!size && on->request < 0 && !on->due_ns) {  // an idle connection at the end
        close(on->fd);
        continue;
      }
      if (size <= 0 || on->request < 0) {
        fprintf(stderr, "the server closed a connection\n");
        return 1;
      }
      Request* request = &requests[on->request];
      if (!take(on, request, part, size)) continue;
      --left;
      on->request = -1;
      if (next + num_paused < num) {
        on->due_ns = now_ns(CLOCK_MONOTONIC) + request->pause_ns;
        ++num_paused;
      }
    }
  }
  const int64_t elapsed_ns = now_ns(CLOCK_MONOTONIC) - began_ns;
  const int64_t spent_ns = now_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
  for (long i = 0; i < num; ++i) printf("%ld %ld\n", requests[i].ttft_ns, requests[i].events);
  printf("all %ld %ld\n", elapsed_ns, spent_ns);
  return 0;
}
