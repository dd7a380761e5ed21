//! `tortie.exe agent --bgp` on a Windows node with an L2Bridge network of both families: it is the route reflector of two machines with BIRD. Wine
//! cannot change routes, so what the speaker learns stays out of the machine's tables, and the node says so.

use std::fs::{self, File};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipnet::Ipv6Net;
use serde_json::{Value, json};
use tortie_hcn::HcnExt as _;
use tortie_hcn::schema::{Network, NetworkMode};
use tortie_hns_emulator::{Config, Emulator};
use tortie_kernel::namespace::NetNs;
use tortie_servers::programs::Program;
use tortie_servers::wine::{HNS_ADDRESS, windows_path};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_windows::NETWORK;

use super::cluster::{Hns, NODE, windows_kubeconfig};
use super::frames::path_of;
use super::prefix::{Killed, Prefix, output};
use super::underlay::Underlay;
use super::wait;
use setup::windows::{self, Built, Libraries};
use setup::{packages, step};

const WINDOWS: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
const WINDOWS_V6: &str = "2001:db8::3";
const POOL_V6: &str = "fd00:10:244::/56";
const ONE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 9);
/// What the machines announce. Nodes pass on what belongs to pools, as Calico's do.
const OTHERS: &str = "10.50.0.0/16";
const OF_ONE: &str = "10.50.1.0/24";
const OF_OTHER: &str = "10.50.2.0/24";
const AS: u32 = 64_512;
const PATIENCE: Duration = Duration::from_secs(40);
const LOG: &str = "agent.log";

pub(super) fn run(_: &Libraries) -> Result<()> {
    packages::install(&packages::BGP_PACKAGES)?;
    let built = windows::build()?;
    step("tortie.exe as a BGP route reflector of two BIRDs", || {
        let cluster = Cluster::new(&built)?;
        cluster
            .run()
            .with_context(|| fs::read_to_string(cluster.machine.outside().join(LOG)).unwrap_or_default())
    })
}

struct Cluster<'a> {
    // Fields are dropped in this order.
    built: &'a Built,
    machine: Prefix,
    kube: KubeApi,
    hns: Hns,
    underlay: Underlay,
}

impl<'a> Cluster<'a> {
    fn new(built: &'a Built) -> Result<Self> {
        let underlay = Underlay::new([WINDOWS, ONE, OTHER])?;
        let config = Config::as_hns(Config::SERVER_2022, WINDOWS);
        let emulator = Emulator::with_switch(config, NetNs::open(&path_of(&underlay.windows))?)?;
        // Programs under Wine have the loopback of the node.
        let hns = underlay.windows.run(|| Hns::serve(emulator))??;
        let kube = underlay.windows.run(|| KubeApi::start(&KubeOptions::default()))??;
        let machine = Prefix::new(&built.libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
        Ok(Self { built, machine, kube, hns, underlay })
    }

    /// The pool, the node, and the sessions.
    fn prepare(&self) -> Result<()> {
        let kube = &self.kube;
        self.underlay.windows.run(|| kube.create_definitions())??;
        let pool =
            json!({"cidr": "10.244.0.0/16", "blockSize": 26, "vxlanMode": "Never", "ipipMode": "Never"});
        let ipv6 = json!({"cidr": POOL_V6, "blockSize": 122, "vxlanMode": "Never", "ipipMode": "Never"});
        let others =
            json!({"cidr": OTHERS, "assignmentMode": "Manual", "vxlanMode": "Never", "ipipMode": "Never"});
        let ipam = json!({"strictAffinity": true, "autoAllocateBlocks": true, "maxBlocksPerHost": 0});
        let bgp = json!({"nodeToNodeMeshEnabled": false, "asNumber": AS});
        let peer = |address: Ipv4Addr| json!({"peerIP": address, "asNumber": AS});
        for (kind, name, spec) in [
            ("IPPool", "pods", pool),
            ("IPPool", "pods-v6", ipv6),
            ("IPPool", "others", others),
            ("IPAMConfig", "default", ipam),
            ("BGPConfiguration", "default", bgp),
            ("BGPPeer", "one", peer(ONE)),
            ("BGPPeer", "other", peer(OTHER)),
        ] {
            self.apply(&json!({"apiVersion": "crd.projectcalico.org/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}))?;
        }
        let annotations = json!({"projectcalico.org/RouteReflectorClusterID": "244.0.0.1"});
        let labels = json!({"kubernetes.io/os": "windows"});
        self.apply(&json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": NODE, "labels": labels, "annotations": annotations},
        "status": {"addresses": [
            {"type": "InternalIP", "address": WINDOWS},
            {"type": "InternalIP", "address": WINDOWS_V6},
        ]}}))
    }

    fn run(&self) -> Result<()> {
        self.prepare()?;
        let one = Bird::start(self, ("one", &self.underlay.linux), ONE, OF_ONE)?;
        let other = Bird::start(self, ("other", &self.underlay.outside), OTHER, OF_OTHER)?;
        let agent = self.start_agent()?;
        self.until("the network", || {
            let network = self.hns.emulator.network_by_name(NETWORK)?;
            Ok(network.is_some_and(|network| network.r#type == NetworkMode::L2Bridge))
        })?;
        let network = self.hns.emulator.network_by_name(NETWORK)?.context("the network has gone")?;
        let block = network.subnets().next().context("it has no subnet")?.ip_address_prefix.clone();
        self.has_ipv6(&network)?;
        for (bird, of_the_other, hop) in [(&one, OF_OTHER, OTHER), (&other, OF_ONE, ONE)] {
            let what = format!("{} has the node's block and what the other one announces", bird.name);
            self.until(&what, || {
                let own = bird.ask(&format!("show route {block} all"))?;
                let reflected = bird.ask(&format!("show route {of_the_other} all"))?;
                Ok(own.contains(&format!("BGP.next_hop: {WINDOWS}"))
                    && reflected.contains(&format!("BGP.next_hop: {hop}"))
                    && reflected.contains("BGP.cluster_list: 244.0.0.1"))
            })
            .with_context(|| self.command(&["bgp", "why", of_the_other]).unwrap_or_default())
            .with_context(|| bird.ask("show route all").unwrap_or_default())?;
        }
        // The speaker runs before the agent answers operators.
        self.until("the agent answers", || Ok(self.command(&["bgp", "peers"]).is_ok()))?;
        let shown = self.command(&["bgp", "routes"])?;
        ensure!(shown.contains(OF_ONE) && shown.contains(OF_OTHER), "tortie.exe bgp routes: {shown}");
        let peers = self.command(&["bgp", "peers"])?;
        ensure!(peers.matches("established").count() + peers.matches("Established").count() == 2, "{peers}");
        self.until("the node says that it has no such routes", || {
            let report = self.kubectl(&["get", "nodereports", NODE, "-o", "json"])?;
            Ok(report.contains("BgpRouteNotInForce"))
        })?;
        // The other one keeps the routes for the restart time, or loses them: both are right without graceful restart of Wine's sockets.
        drop(one);
        self.until("what a machine announced goes with it", || {
            Ok(!other.ask(&format!("show route {OF_ONE}"))?.contains(OF_ONE))
        })?;
        drop(agent);
        Ok(())
    }

    /// The network has a subnet of the IPv6 pool, and the node an address there.
    fn has_ipv6(&self, network: &Network) -> Result<()> {
        let pool: Ipv6Net = POOL_V6.parse()?;
        let mut nets =
            network.subnets().filter_map(|subnet| subnet.ip_address_prefix.parse::<Ipv6Net>().ok());
        let block = nets.next().filter(|block| pool.contains(block));
        let block = block.with_context(|| format!("no IPv6 subnet: {network:?}"))?;
        self.until("the node has an IPv6 address in the network", || {
            let endpoints = self.hns.emulator.endpoints_of_network(network.id)?;
            let addresses = endpoints.iter().flat_map(|endpoint| &endpoint.ip_configurations);
            let mut addresses = addresses.filter_map(|own| own.ip_address.parse::<Ipv6Addr>().ok());
            Ok(addresses.any(|address| block.contains(&address)))
        })
    }

    fn start_agent(&self) -> Result<Killed> {
        let folder = self.machine.outside();
        let kubeconfig = windows_kubeconfig(&self.kube, folder)?;
        let mut command = self.machine.command(&self.built.tortie());
        command.args(["agent", "--node", NODE, "--bgp", "--windows-network", "l2bridge"]);
        command.arg("--store").arg(format!("kubernetes:{}", windows_path(&kubeconfig)));
        self.underlay.windows.enter_on_spawn(&mut command)?;
        let log = File::create(folder.join(LOG))?;
        Ok(Killed(command.stdout(Stdio::null()).stderr(log).spawn()?))
    }

    /// Runs a command of the node's operator.
    fn command(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.machine.command(&self.built.tortie());
        command.args(arguments);
        self.underlay.windows.enter_on_spawn(&mut command)?;
        Ok(String::from_utf8(output(&mut command)?.stdout)?)
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let kube = &self.kube;
        Ok(self.underlay.windows.run(|| kube.kubectl(arguments))??)
    }

    fn apply(&self, object: &Value) -> Result<()> {
        let kube = &self.kube;
        let applied = self.underlay.windows.run(|| kube.apply(&object.to_string()))?;
        applied.map(drop).with_context(|| object.to_string())
    }

    fn until(&self, what: &str, is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        wait::until(what, PATIENCE, is_so)
    }
}

/// A machine with BIRD, which announces a network to the Windows node.
struct Bird {
    name: &'static str,
    socket: String,
    _daemon: Killed,
}

impl Bird {
    fn start(
        cluster: &Cluster<'_>,
        (name, namespace): (&'static str, &NetNs),
        address: Ipv4Addr,
        announced: &str,
    ) -> Result<Self> {
        let folder = cluster.machine.outside();
        let path = |ending: &str| folder.join(format!("{name}.{ending}")).display().to_string();
        let text = format!(
            "router id {address};\nprotocol device {{}}\nprotocol static {{ ipv4; route {announced} blackhole; }}\n\
             protocol bgp windows {{ local {address} as {AS}; neighbor {WINDOWS} as {AS}; connect retry time 2;\n\
             ipv4 {{ import all; export where source = RTS_STATIC; next hop self; }}; }}\n"
        );
        fs::write(path("conf"), text)?;
        let mut command = Command::new(Program::Bird.find()?);
        command.args(["-f", "-c", &path("conf"), "-s", &path("ctl"), "-P", &path("pid")]);
        namespace.enter_on_spawn(&mut command)?;
        let log = File::create(path("log"))?;
        let daemon = Killed(command.stdout(log.try_clone()?).stderr(log).spawn()?);
        Ok(Self { name, socket: path("ctl"), _daemon: daemon })
    }

    /// What BIRD answers; nothing if it is not there yet.
    fn ask(&self, question: &str) -> Result<String> {
        let mut command = Command::new(Program::Birdc.find()?);
        command.arg("-s").arg(&self.socket).args(question.split(' '));
        Ok(String::from_utf8_lossy(&command.output()?.stdout).into_owned())
    }
}
