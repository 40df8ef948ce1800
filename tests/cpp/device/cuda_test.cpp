// The CUDA side without CUDA.
#include "device/cuda.h"

#include "device/stub_cuda.h"

namespace vescale_ckpt::device {
namespace {

TEST_F(Cuda, CopiesByKernelAndBatches) {
  for (const Api& api : {with_batch_13(), with_batch_12()}) {
    SetUp();
    CudaRuntime runtime(api, kImage);
    expect_copied(runtime);
    EXPECT_EQ(seen.calls["launch"], 1);
    EXPECT_EQ(seen.calls["copy_2d"], 1);
    EXPECT_EQ(seen.calls["module_load"], 1);
  }
}

TEST_F(Cuda, CopiesWithoutKernels) {
  CudaRuntime runtime(with_batch_13(), nullptr);
  expect_copied(runtime);
  EXPECT_EQ(seen.calls["launch"], 0);
  EXPECT_EQ(seen.batched, 51u);  // the large one and the small ones
}

TEST_F(Cuda, GapsOfASlabHoldNothingOfTheDevice) {
  CudaRuntime runtime(with_batch_13(), kImage);
  std::vector<std::byte> memory(64 * 64 + 64, std::byte{0xCD});
  std::byte* host = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64;
  const int64_t size = 40, stride = 1;
  const auto copied = [&](std::span<const std::byte> range, std::byte value) {
    return std::ranges::all_of(range, [&](std::byte found) { return found == value; });
  };
  Pipeline pipeline(runtime.accelerator(0));
  for (int round = 0; round < 4; ++round) {  // each slab, and one again
    std::vector<DeviceRow> rows;
    for (uint64_t i = 0; i < 64; ++i) {
      rows.emplace_back(reinterpret_cast<DeviceAddress>(seen.device.data()) + 40 * i, host + 64 * i, 1,
                        std::span(&size, 1), std::span(&stride, 1));
    }
    const StreamHandle producer = 0;
    pipeline.start(std::move(rows), {&producer, 1}, {.alignment = 64});
    ASSERT_TRUE(pipeline.wait(10min));
    for (uint64_t i = 0; i < 63; ++i) {
      ASSERT_EQ(std::memcmp(host + 64 * i, &seen.device[40 * i], 40), 0);
      ASSERT_TRUE(copied({host + 64 * i + 40, 24}, std::byte{0}));
    }
  }
  EXPECT_LE(seen.calls["clear"], 3);
}

TEST_F(Cuda, PreparedPipelinesMakeNothingAtTheirFirstCopy) {
  CudaRuntime runtime(with_batch_13(), kImage);
  std::vector<std::byte> host;
  const StreamHandle producer = 0;
  Pipeline pipeline(runtime.accelerator(0));
  pipeline.prepare();
  const auto made = [&] {
    std::vector<int> counts;
    for (const char* call : {"stream_create", "event_create", "module_load", "allocate", "host_allocate"}) {
      counts.push_back(seen.calls[call]);
    }
    return counts;
  };
  const std::vector<int> before = made();
  EXPECT_EQ(before, (std::vector<int>{2, 7, 1, 3, 3}));
  pipeline.start(rows(host), {&producer, 1});
  ASSERT_TRUE(pipeline.wait(10min));
  EXPECT_EQ(made(), before);
}

TEST_F(Cuda, WhatOtherWorkLeftOnTheDeviceIsNamedAsTheirs) {
  std::vector<std::byte> host;
  const StreamHandle producer = 0;
  CudaRuntime runtime(with_batch_13(), kImage);
  Pipeline pipeline(runtime.accelerator(0));
  const auto text = [&](const char* call, int code) -> std::string {
    seen.answers = {{call, code}};
    std::string result = "nothing was thrown";
    try {
      Pipeline fresh(runtime.accelerator(0));
      pipeline.start(rows(host), {&producer, 1});
      pipeline.wait(10min);
    } catch (const Error& error) {
      EXPECT_EQ(error.code, code);
      result = error.what();
    }
    seen.answers.clear();
    return result;
  };
  for (const char* call : {"stream_create", "event_create", "stream_is_captured"}) {
    for (const int code : {214, 700, 710, 719}) {
      EXPECT_EQ(text(call, code),
                "device 0 had failed before, by work of this process: CUDA: not today, cudaErrorFake (" +
                    std::to_string(code) + ")");
    }
    for (const int code : {1, 704, 712, 713, 801}) {
      EXPECT_EQ(text(call, code).find("had failed before"), std::string::npos) << call << code;
    }
  }
  // What goes wrong behind that may be theirs as well as ours.
  EXPECT_EQ(text("event_synchronize", 710),
            "wait for copies on device 0: CUDA: not today, cudaErrorFake, perhaps by other work of this process (710)");
}

TEST_F(Cuda, AStreamThatIsCapturedIsRefused) {
  CudaRuntime runtime(with_batch_13(), kImage);
  std::vector<std::byte> host;
  const StreamHandle producers[] = {0, 8};
  seen.captured[reinterpret_cast<cuda::Stream>(8)] = 1;
  Pipeline pipeline(runtime.accelerator(0));
  try {
    pipeline.start(rows(host), producers);
    FAIL() << "it copies";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "copy tensors of device 0: the current stream is being captured into a CUDA graph: save and load before or "
        "after the capture");
  }
  seen.captured.clear();
  pipeline.start(rows(host), producers);  // it can go on
  EXPECT_TRUE(pipeline.wait(10min));
}

TEST_F(Cuda, ImagesForOtherDevicesAreNotUsed) {
  for (const char* call : {"module_load", "module_function"}) {
    SetUp();
    seen.answers[call] = 209;  // no binary for this device
    CudaRuntime runtime(with_batch_13(), kImage);
    EXPECT_FALSE(runtime.accelerator(1).has_kernel());
    expect_copied(runtime);
    EXPECT_TRUE(noted("device 1 does not take the kernel that packs small tensors"));
    EXPECT_EQ(seen.calls["launch"], 0);
    EXPECT_EQ(seen.calls["module_load"], 1);
  }
}

TEST_F(Cuda, FullDevicesHaveNoSlab) {
  for (const char* call : {"allocate", "host_allocate"}) {
    SetUp();
    seen.answers[call] = cuda::kOutOfMemory;
    CudaRuntime runtime(with_batch_13(), kImage);
    EXPECT_EQ(runtime.accelerator(0).make_slab(4096), nullptr);
    EXPECT_EQ(seen.calls["release"], std::string(call) == "host_allocate");
    EXPECT_TRUE(noted("device 0 has no 0 MiB to pack small tensors in"));
    seen.answers[call] = 1;
    EXPECT_THROW(runtime.accelerator(0).make_slab(4096), Error);
  }
}

TEST_F(Cuda, ErrorsSayWhatWasDoneAndWhatCudaSaid) {
  std::vector<std::byte> host;
  const StreamHandle producer = 0;
  const auto text = [&](const char* call, bool packed_only = false) -> std::string {
    seen.answers = {{call, 77}};
    std::string result = "nothing was thrown";
    try {
      CudaRuntime runtime(fake_api(), kImage);
      Accelerator& accelerator = runtime.accelerator(1);
      accelerator.page_lock(seen.device);
      accelerator.page_unlock(seen.device.data());
      Pipeline pipeline(accelerator);
      std::vector<DeviceRow> copied = rows(host);
      if (packed_only) copied.erase(copied.begin() + 51, copied.end());
      pipeline.start(std::move(copied), {&producer, 1});
      pipeline.wait(10min);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind, Error::Kind::device);
      EXPECT_EQ(error.code, 77);
      result = error.what();
    }
    seen.answers.clear();
    return result;
  };
  const std::string said = ": CUDA: not today, cudaErrorFake (77)";
  EXPECT_EQ(text("count"), "ask for devices" + said);
  EXPECT_EQ(text("device_get"), "find device 1" + said);
  EXPECT_EQ(text("context_push"), "use device 1" + said);
  EXPECT_EQ(text("host_register"), "page-lock 1048576 bytes" + said);
  EXPECT_EQ(text("host_unregister"), "unlock pages" + said);
  EXPECT_EQ(text("stream_wait_event"), "order copies on device 1 after an event" + said);
  EXPECT_EQ(text("event_record"), "record an event on a stream of device 1" + said);
  EXPECT_EQ(text("event_synchronize"), "wait for copies on device 1" + said);
  EXPECT_EQ(text("copy"), "copy 200000 bytes from device 1 to the host" + said);
  EXPECT_EQ(text("copy", true), "copy a table of 51 ranges to device 1" + said);
  EXPECT_EQ(text("copy_2d"), "copy 20 runs of 8000 bytes from device 1 to the host" + said);
  EXPECT_EQ(text("launch"), "launch the pack kernel on device 1" + said);
}

TEST_F(Cuda, SaysWhatItIs) {
  CudaRuntime runtime(fake_api(), nullptr);
  EXPECT_EQ(runtime.version(), "CUDA runtime 13.0, driver 13.1");
  EXPECT_EQ(runtime.device_count(), 2);
  EXPECT_EQ(runtime.device_name(1), "Fake 9000");
  EXPECT_EQ(runtime.current_device(), 1);
  EXPECT_EQ(seen.calls["context_retain"], 0) << "to ask takes no memory of a device";
  EXPECT_EQ(runtime.accelerator(1).pci_address(), "0000:1B:00.0");
  EXPECT_THROW(runtime.accelerator(2), Error);
  EXPECT_THROW(runtime.accelerator(-1), Error);
}

TEST(CudaApi, SaysWhyThereIsNone) {
  std::string reason;
  const CudaRuntime* runtime = cuda_runtime(reason);
  if (runtime != nullptr) GTEST_SKIP() << "there is " << runtime->version();
  EXPECT_NE(reason.find("CUDA"), std::string::npos) << reason;
}

}  // namespace
}  // namespace vescale_ckpt::device
