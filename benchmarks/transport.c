/* What raw MPI does between two ranks, to compare the transport with: see transport.py.
 *
 *     mpirun -np 2 ./transport_c SIZE[xCOUNT]...
 *
 * For each size rank 0 prints {"bytes": ..., "latency_s": ..., "bytes_per_s": ...}: the median half round trip of one message
 * there and one back, and the throughput of COUNT messages, WINDOW of them under way at once, until the last is acknowledged.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { WINDOW = 4, TRIPS = 31, DATA = 1, ANSWER = 2 };

/* Large pages where there are any: our buffers have them too (comm/huge_pages.py), and copies between processes are twice as fast. */
static char *allocate(size_t bytes) {
  const size_t page = (size_t)2 << 20;
  char *memory = aligned_alloc(page, (bytes + page - 1) / page * page);
#ifdef __linux__
  if (memory != NULL) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median_trip(char *out, char *in, int size, int rank) {
  double seconds[TRIPS];
  for (int trip = -2; trip < TRIPS; trip++) {
    MPI_Request receive, send;
    MPI_Irecv(in, size, MPI_BYTE, 1 - rank, DATA, MPI_COMM_WORLD, &receive);
    const double begin = MPI_Wtime();
    if (rank == 1) MPI_Wait(&receive, MPI_STATUS_IGNORE);
    MPI_Isend(out, size, MPI_BYTE, 1 - rank, DATA, MPI_COMM_WORLD, &send);
    if (rank == 0) MPI_Wait(&receive, MPI_STATUS_IGNORE);
    MPI_Wait(&send, MPI_STATUS_IGNORE);
    if (trip >= 0) seconds[trip] = MPI_Wtime() - begin;
  }
  qsort(seconds, TRIPS, sizeof(double), by_value);
  return seconds[TRIPS / 2] / 2;
}

static double throughput(char *buffers, int size, int count, int rank) {
  MPI_Request requests[WINDOW], answer;
  char done = 0;
  double begin = 0;
  for (int turn = 0; turn < 2; turn++) { /* the first warms the path up */
    const int messages = turn == 0 ? WINDOW : count;
    for (int slot = 0; slot < WINDOW; slot++) requests[slot] = MPI_REQUEST_NULL;
    MPI_Barrier(MPI_COMM_WORLD);
    begin = MPI_Wtime();
    for (int message = 0; message < messages; message++) {
      const int slot = message % WINDOW;
      char *buffer = buffers + (size_t)slot * (size_t)size;
      MPI_Wait(&requests[slot], MPI_STATUS_IGNORE);
      if (rank == 0)
        MPI_Isend(buffer, size, MPI_BYTE, 1, DATA, MPI_COMM_WORLD, &requests[slot]);
      else
        MPI_Irecv(buffer, size, MPI_BYTE, 0, DATA, MPI_COMM_WORLD, &requests[slot]);
    }
    MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
    if (rank == 0)
      MPI_Irecv(&done, 1, MPI_BYTE, 1, ANSWER, MPI_COMM_WORLD, &answer);
    else
      MPI_Isend(&done, 1, MPI_BYTE, 0, ANSWER, MPI_COMM_WORLD, &answer);
    MPI_Wait(&answer, MPI_STATUS_IGNORE);
  }
  return (double)size * count / (MPI_Wtime() - begin);
}

int main(int argc, char **argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int argument = 1; argument < argc; argument++) {
    char *rest;
    const int size = (int)strtol(argv[argument], &rest, 10);
    const int count = *rest == 'x' ? atoi(rest + 1) : 16;
    char *buffers = allocate((size_t)size * WINDOW);
    if (buffers == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
    memset(buffers, rank, (size_t)size * WINDOW);
    const double latency_s = median_trip(buffers, buffers + size, size, rank);
    const double bytes_per_s = throughput(buffers, size, count, rank);
    if (rank == 0) printf("{\"bytes\": %d, \"latency_s\": %.9f, \"bytes_per_s\": %.0f}\n", size, latency_s, bytes_per_s);
    free(buffers);
  }
  MPI_Finalize();
  return 0;
}
