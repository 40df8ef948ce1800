// When copies are given to CUDA in batches, and when one by one.
#include "device/stub_cuda.h"

namespace vescale_ckpt::device {
namespace {

TEST_F(Cuda, CopiesOneByOneWhereThereAreNoBatchesOrTheyAreRefused) {
  {
    CudaRuntime runtime(fake_api(), nullptr);
    expect_copied(runtime);
    EXPECT_EQ(seen.calls["copy"], 51);
  }
  SetUp();
  for (const int refusal : {cuda::kNeedsNewerDriver, cuda::kNotSupported}) {
    SetUp();
    seen.answers["batch"] = refusal;
    CudaRuntime runtime(with_batch_12(), nullptr);
    expect_copied(runtime);
    EXPECT_EQ(seen.calls["batch"], 1);
    EXPECT_EQ(seen.calls["copy"], 51);
    seen.answers.clear();
    expect_copied(runtime);
    EXPECT_EQ(seen.calls["batch"], 1) << "it is tried again";
    EXPECT_TRUE(noted("device 1 takes no batches of copies"));
  }
}

TEST_F(Cuda, OneRefusedBatchIsNotTheEndOfBatches) {
  CudaRuntime runtime(with_batch_12(), nullptr);
  seen.answers["batch"] = 1;  // invalid value
  expect_copied(runtime);
  EXPECT_EQ(seen.calls["copy"], 51);
  EXPECT_TRUE(noted("device 1 refused a batch of copies"));
  seen.answers.clear();
  expect_copied(runtime);
  EXPECT_EQ(seen.batched, 51u);
}

TEST_F(Cuda, NoBatchesWhereLockedMemoryHasOtherAddressesOnTheDevice) {
  seen.as_it_is = 0;
  CudaRuntime runtime(with_batch_13(), nullptr);
  expect_copied(runtime);
  EXPECT_EQ(seen.calls["batch"], 0);
  EXPECT_EQ(seen.calls["copy"], 51);
  EXPECT_TRUE(noted("it has addresses of its own for locked host memory"));
}

TEST_F(Cuda, NoBatchesWhereTheDriverIsOlderThanThey) {
  seen.driver = 12040;
  CudaRuntime runtime(with_batch_13(), nullptr);
  expect_copied(runtime);
  EXPECT_EQ(seen.calls["batch"], 0);
  EXPECT_EQ(seen.calls["copy"], 51);
  EXPECT_TRUE(noted("its driver is older than CUDA 12.8"));
}

TEST_F(Cuda, NoBatchesWhereTheUserWantsNone) {
  CudaRuntime runtime(with_batch_13(), nullptr);
  runtime.enable_batches(false);
  expect_copied(runtime);
  EXPECT_EQ(seen.calls["batch"], 0);
  EXPECT_EQ(seen.calls["copy"], 51);
  EXPECT_TRUE(noted("VESCALE_CKPT_COPY_BATCHES=0"));
  runtime.enable_batches(true);
  expect_copied(runtime);
  EXPECT_EQ(seen.batched, 51u);
}

TEST_F(Cuda, NoBatchesAfterALockWasRefused) {  // copies may then be from and to memory that is not locked
  CudaRuntime runtime(with_batch_13(), nullptr);
  seen.answers["host_register"] = 1;
  EXPECT_THROW(runtime.accelerator(0).page_lock(seen.device), Error);
  seen.answers.clear();
  expect_copied(runtime);  // on the other device
  EXPECT_EQ(seen.calls["batch"], 0);
  EXPECT_EQ(seen.calls["copy"], 51);
  EXPECT_TRUE(noted("a page lock was refused"));
}

TEST_F(Cuda, BatchesAreBounded) {
  CudaRuntime runtime(with_batch_13(), nullptr);
  const auto stream = runtime.accelerator(0).make_stream(Priority::normal);
  std::vector<std::byte> host(4 * 1200);
  std::vector<FlatCopy> copies;
  for (uint64_t i = 0; i < 1200; ++i) {
    copies.push_back({reinterpret_cast<DeviceAddress>(seen.device.data()) + 8 * i, host.data() + 4 * i, 4});
  }
  stream->copy(copies);
  EXPECT_EQ(seen.batched, 1200u);
  for (uint64_t i = 0; i < 1200; ++i) ASSERT_EQ(std::memcmp(&host[4 * i], &seen.device[8 * i], 4), 0);
  std::ranges::fill(seen.device, std::byte{0});
  stream->copy_to_device(copies);
  EXPECT_EQ(seen.batched, 2400u);
  for (uint64_t i = 0; i < 1200; ++i) ASSERT_EQ(std::memcmp(&host[4 * i], &seen.device[8 * i], 4), 0);
  EXPECT_LE(seen.most_in_batch, 512u);
}

}  // namespace
}  // namespace vescale_ckpt::device
