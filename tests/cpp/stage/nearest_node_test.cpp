#include <filesystem>
#include <fstream>

#include "scratch.h"
#include "stage/device_pipelines.h"

namespace vescale_ckpt::stage {
namespace {

class NearestNodeTest : public ScratchTest {
 protected:
  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path file = std::filesystem::path(path("sys")) / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void have_nodes(const std::string& nodes) { write("devices/system/node/has_memory", nodes); }
  void place(const std::string& pci_address, const std::string& node) {
    write("bus/pci/devices/" + pci_address + "/numa_node", node);
  }
  std::optional<int> nearest(std::vector<std::string> addresses) { return nearest_node(addresses, path("sys")); }
};

TEST_F(NearestNodeTest, IsThatOfAllAcceleratorsInUse) {
  have_nodes("0-1");
  place("0000:3b:00.0", "1");
  place("0000:5e:00.0", "1");
  place("0000:af:00.0", "0");
  EXPECT_EQ(nearest({}), std::nullopt);
  EXPECT_EQ(nearest({"0000:3B:00.0"}), 1);  // as CUDA writes it
  EXPECT_EQ(nearest({"0000:3b:00.0", "0000:5e:00.0"}), 1);
  EXPECT_EQ(nearest({"0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0"}), std::nullopt);
}

TEST_F(NearestNodeTest, IsNoneWhereTheSystemDoesNotKnowIt) {
  have_nodes("0,2");
  place("0000:3b:00.0", "-1");
  place("0000:5e:00.0", "2");
  for (const char* unknown : {"0000:3b:00.0", "0000:ff:00.0", ""}) {
    EXPECT_EQ(nearest({unknown}), std::nullopt);
    EXPECT_EQ(nearest({unknown, "0000:5e:00.0"}), std::nullopt);
  }
  EXPECT_EQ(nearest({"0000:5e:00.0"}), 2);
}

TEST_F(NearestNodeTest, IsNoneOnMachinesOfOneNode) {
  place("0000:3b:00.0", "0");
  EXPECT_EQ(nearest({"0000:3b:00.0"}), std::nullopt);  // no such file
  have_nodes("0");
  EXPECT_EQ(nearest({"0000:3b:00.0"}), std::nullopt);
  have_nodes("0-1");
  EXPECT_EQ(nearest({"0000:3b:00.0"}), 0);
}

}  // namespace
}  // namespace vescale_ckpt::stage
