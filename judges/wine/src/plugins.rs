//! The CNI plugins win-overlay and win-bridge of containernetworking/plugins against the emulated HNS, with the addresses of
//! host-local.
//!
//! Each uses HNS by the old interface, which attaches endpoints to running containers, and by the new one
//! (`"apiVersion": 2`), which attaches them to namespaces.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tortie_hcn::schema::Namespace;
use tortie_hcn::{Call, Guid, Hcn, HcnExt, Kind, Version};
use tortie_hns_emulator::{Config, Emulator};
use tortie_servers::wine::{HNS_ADDRESS, windows_path};

use super::clients::VERSIONS;
use super::cluster::{ADDRESS, Hns};
use super::frames::Frames;
use super::prefix::{Prefix, plugin_output};
use setup::windows::Libraries;
use setup::{go, step, workspace};

/// The module that names the version of the plugins.
const MODULE: &str = "tests/cni-windows";
const PACKAGES: &str = "github.com/containernetworking/plugins/plugins";

/// The addresses of the cluster's pods, of this node's, and of Services, as most examples have them.
const PODS: &str = "10.244.0.0/16";
const SUBNET: &str = "10.244.3.0/24";
const SERVICES: &str = "10.96.0.0/12";
/// The first address that host-local gives. An ADD that fails gets it; then host-local continues with the next ones.
const START: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 10);
/// The pods' addresses.
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 11);
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 12);

/// The node's own endpoint in the network of win-bridge.
const NODE_ENDPOINT: &str = "pods_ep";

/// A plugin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plugin {
    Overlay,
    Bridge,
}

/// The interface of HNS that a plugin uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Interface {
    Old,
    New,
}

pub(super) fn run(libraries: &Libraries) -> Result<()> {
    let programs = build()?;
    for version in VERSIONS {
        for plugin in [Plugin::Overlay, Plugin::Bridge] {
            for interface in [Interface::Old, Interface::New] {
                let name =
                    format!("{} by the {} interface of HNS {version}", plugin.name(), interface.name());
                step(&name, || Node::new(libraries, &programs, plugin, interface, version)?.run())?;
            }
        }
    }
    Ok(())
}

/// Builds the plugins, and returns their folder.
pub(super) fn build() -> Result<PathBuf> {
    let folder = workspace()?.join("target/cni-windows");
    fs::create_dir_all(&folder)?;
    let mut command = go::for_windows(&workspace()?.join(MODULE))?;
    command.args(["build", "-mod=readonly", "-trimpath", "-ldflags", "-s -w", "-o"]).arg(&folder);
    let packages = ["main/windows/win-overlay", "main/windows/win-bridge", "ipam/host-local"];
    command.args(packages.map(|package| format!("{PACKAGES}/{package}")));
    setup::run(&mut command)?;
    Ok(folder)
}

impl Plugin {
    fn name(self) -> &'static str {
        match self {
            Plugin::Overlay => "win-overlay",
            Plugin::Bridge => "win-bridge",
        }
    }

    /// The network that the plugin expects, as flannel creates it.
    fn network(self) -> Value {
        let (r#type, policies) = match self {
            Plugin::Overlay => ("Overlay", json!([{"Type": "VSID", "Settings": {"IsolationId": 4096}}])),
            Plugin::Bridge => ("L2Bridge", json!([])),
        };
        let routes = json!([{"NextHop": "10.244.3.1", "DestinationPrefix": "0.0.0.0/0"}]);
        let subnet = json!({"IpAddressPrefix": SUBNET, "Policies": policies, "Routes": routes});
        json!({"Name": "pods", "Type": r#type, "Policies": [{"Type": "HostRoute", "Settings": {}}],
            "Ipams": [{"Type": "Static", "Subnets": [subnet]}], "SchemaVersion": {"Major": 2, "Minor": 0}})
    }

    /// The gateway of pods: that of the network, or for win-bridge the node's own endpoint, which has the second address.
    fn gateway(self) -> &'static str {
        match self {
            Plugin::Overlay => "10.244.3.1",
            Plugin::Bridge => "10.244.3.2",
        }
    }

    /// The policies of a pod's endpoint. The plugins add to those of the configuration what `ipMasq` (of win-overlay), `loopbackDSR`
    /// and the runtime's port mappings mean. The exception of win-bridge's `ipMasqNetwork` is there already.
    fn policies(self, interface: Interface, address: Ipv4Addr) -> Value {
        let nat = |settings: Value| json!({"Type": "OutBoundNAT", "Settings": settings});
        let configured = nat(json!({"Exceptions": [PODS, SERVICES]}));
        let route =
            json!({"Type": "SDNRoute", "Settings": {"DestinationPrefix": SERVICES, "NeedEncap": true}});
        let loopback = nat(json!({"Destinations": [address]}));
        let provider = json!({"Type": "ProviderAddress", "Settings": {"ProviderAddress": ADDRESS}});
        let masquerade = nat(json!({"Exceptions": [SUBNET]}));
        let mut port = json!({"InternalPort": 80, "ExternalPort": 8080, "Protocol": 6});
        if interface == Interface::New {
            port["VIP"] = json!("");
        }
        let port = json!({"Type": "PortMapping", "Settings": port});
        match (self, interface) {
            (Plugin::Overlay, Interface::Old) => json!([configured, route, provider, masquerade, loopback]),
            (Plugin::Overlay, Interface::New) => json!([configured, route, loopback, provider, masquerade]),
            (Plugin::Bridge, _) if address == FIRST => json!([configured, route, port, loopback]),
            (Plugin::Bridge, _) => json!([configured, route, loopback]),
        }
    }
}

impl Interface {
    fn name(self) -> &'static str {
        match self {
            Interface::Old => "old",
            Interface::New => "new",
        }
    }
}

/// A node with the network of a plugin.
struct Node {
    plugin: Plugin,
    interface: Interface,
    hns: Hns,
    machine: Prefix,
    programs: PathBuf,
    network: Guid,
    frames: Frames,
}

/// A pod.
struct Pod {
    name: &'static str,
    address: Ipv4Addr,
    /// `CNI_NETNS`: a namespace, or what the container is in the old interface.
    place: String,
}

impl Node {
    fn new(
        libraries: &Libraries,
        programs: &Path,
        plugin: Plugin,
        interface: Interface,
        version: Version,
    ) -> Result<Self> {
        let frames = Frames::new(ADDRESS)?;
        let emulator = Emulator::with_switch(Config::as_hns(version, ADDRESS), frames.node()?)?;
        let hns = Hns::serve(emulator)?;
        let machine = Prefix::new(libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
        let settings = plugin.network().to_string();
        let created = Call::Create { kind: Kind::Network, network: Guid::ZERO, id: Guid::ZERO, settings };
        let network = serde_json::from_str(&hns.service.call(&created)?)?;
        if plugin == Plugin::Bridge {
            hns.connect_node(network, NODE_ENDPOINT, plugin.gateway())?;
        }
        let programs = programs.to_owned();
        Ok(Self { plugin, interface, hns, machine, programs, network, frames })
    }

    fn run(self) -> Result<()> {
        self.refused().context("ADD for a container that does not run")?;
        let pods = [self.start("first", FIRST)?, self.start("second", SECOND)?];
        for pod in &pods {
            self.add(pod).with_context(|| format!("ADD of {}", pod.name))?;
        }
        self.frames.exchange([FIRST, SECOND]).context("packets between the pods")?;
        if self.interface == Interface::Old {
            self.share(&pods[0]).context("another container of a pod")?;
        }
        for pod in &pods {
            for time in ["DEL", "DEL again"] {
                let deleted = plugin_output(&mut self.command("DEL", pod)?).context(time)?;
                ensure!(deleted.stdout.is_empty(), "{deleted:?}");
            }
        }
        self.nothing_is_left()
    }

    /// A container that runs, with its namespace, if the runtime makes it.
    fn start(&self, name: &'static str, address: Ipv4Addr) -> Result<Pod> {
        let place = match self.interface {
            Interface::Old => {
                self.hns.service.start_container(name);
                "none".to_owned()
            }
            Interface::New => self.hns.service.create_namespace(&Namespace::default())?.to_string(),
        };
        Ok(Pod { name, address, place })
    }

    fn refused(&self) -> Result<()> {
        let place = match self.interface {
            Interface::Old => "none".to_owned(),
            Interface::New => Guid::random().to_string(),
        };
        let pod = Pod { name: "nobody", address: START, place };
        let refused = self.command("ADD", &pod)?.output()?;
        let text = String::from_utf8_lossy(&refused.stdout);
        ensure!(!refused.status.success() && text.contains("failed to a"), "{refused:?}");
        self.nothing_is_left()
    }

    fn add(&self, pod: &Pod) -> Result<()> {
        let Output { stdout, .. } = plugin_output(&mut self.command("ADD", pod)?)?;
        let result: Value = serde_json::from_slice(&stdout)?;
        let endpoint = self.endpoint(pod)?;
        let namespace: Guid = serde_json::from_value(endpoint["HostComputeNamespace"].clone())?;
        ensure!(self.interface == Interface::Old || namespace.to_string() == pod.place, "{endpoint}");
        let mac = endpoint["MacAddress"].as_str().unwrap_or_default();
        let [.., third, last] = pod.address.octets();
        match self.plugin {
            Plugin::Overlay => ensure!(mac == format!("0E-2A-0a-f4-{third:02x}-{last:02x}"), "{endpoint}"),
            Plugin::Bridge => ensure!(mac.starts_with("00-15-5D-"), "{endpoint}"),
        }
        let name = format!("{}_pods", pod.name);
        let (servers, search) = (["10.96.0.10"], ["n.svc.cluster.local", "svc.cluster.local"]);
        let gateway = self.plugin.gateway();
        let mut expected = json!({"ID": endpoint["ID"], "Name": name, "HostComputeNetwork": self.network,
            "HostComputeNamespace": namespace, "MacAddress": mac, "State": 3,
            "IpConfigurations": [{"IpAddress": pod.address, "PrefixLength": 24}],
            "Routes": [{"NextHop": gateway, "DestinationPrefix": "0.0.0.0/0"}],
            "Dns": {"ServerList": servers, "Search": search},
            "Policies": self.plugin.policies(self.interface, pod.address)});
        if self.interface == Interface::New {
            expected["SchemaVersion"] = json!({"Major": 2, "Minor": 0});
            // hcsshim sends it, and HNS returns what it does not know.
            expected["Health"] = json!({"Extra": {}});
        }
        ensure!(endpoint == expected, "the endpoint is {endpoint:#}, not {expected:#}");
        let expected = json!({"cniVersion": "1.0.0", "interfaces": [{"name": name, "mac": mac}],
            "ips": [{"address": format!("{}/24", pod.address), "gateway": gateway}],
            "dns": {"nameservers": servers, "search": search}});
        ensure!(result == expected, "the result is {result:#}, not {expected:#}");
        self.frames.connect(&*self.hns.service, namespace, pod.address)
    }

    /// Another container of a pod gets the pod's endpoint, and its DEL leaves that.
    fn share(&self, pod: &Pod) -> Result<()> {
        let other = Pod { name: "other", address: pod.address, place: format!("container:{}", pod.name) };
        let path = format!("/endpoints/{}", self.endpoint(pod)?["ID"].as_str().unwrap_or_default());
        let shares = |containers: &[&str]| -> Result<()> {
            let endpoint = self.hns.by_old_interface("GET", &path, &Value::Null)?;
            ensure!(endpoint["SharedContainers"] == json!(containers), "{endpoint}");
            Ok(())
        };
        // The plugin accepts a container that has not started.
        plugin_output(&mut self.command("ADD", &other)?)?;
        shares(&[pod.name])?;
        self.hns.service.start_container(other.name);
        plugin_output(&mut self.command("ADD", &other)?)?;
        shares(&[pod.name, other.name])?;
        plugin_output(&mut self.command("DEL", &other)?)?;
        shares(&[pod.name])
    }

    /// A plugin, as a runtime calls it.
    fn command(&self, command: &str, pod: &Pod) -> Result<std::process::Command> {
        let input = self.machine.outside().join("input");
        fs::write(&input, self.configuration(pod).to_string())?;
        let program = self.programs.join(self.plugin.name()).with_extension("exe");
        let mut plugin = self.machine.command(&program);
        plugin.stdin(File::open(&input)?).env("CNI_COMMAND", command).env("CNI_IFNAME", "eth0");
        plugin.env("CNI_CONTAINERID", pod.name).env("CNI_NETNS", &pod.place);
        plugin.env("CNI_PATH", windows_path(&self.programs)).env("CNI_ARGS", "");
        Ok(plugin)
    }

    fn configuration(&self, pod: &Pod) -> Value {
        let policy = |value: Value| json!({"name": "EndpointPolicy", "value": value});
        let exceptions = [PODS, SERVICES];
        let policies = match self.interface {
            Interface::Old => [
                json!({"Type": "OutBoundNAT", "ExceptionList": exceptions}),
                json!({"Type": "ROUTE", "DestinationPrefix": SERVICES, "NeedEncap": true}),
            ],
            Interface::New => [
                json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": exceptions}}),
                json!({"Type": "SDNRoute", "Settings": {"DestinationPrefix": SERVICES, "NeedEncap": true}}),
            ],
        };
        let addresses = json!({"type": "host-local", "subnet": SUBNET, "rangeStart": START,
            "dataDir": windows_path(&self.addresses())});
        let mut configuration = json!({"cniVersion": "1.0.0", "name": "pods", "type": self.plugin.name(),
            "loopbackDSR": true, "policies": policies.map(policy), "ipam": addresses,
            "dns": {"nameservers": ["10.96.0.10"], "search": ["svc.cluster.local"]},
            "runtimeConfig": {"dns": {"searches": ["n.svc.cluster.local", "svc.cluster.local"]}}});
        if self.interface == Interface::New {
            configuration["apiVersion"] = json!(2);
        }
        match self.plugin {
            Plugin::Overlay => configuration["ipMasq"] = json!(true),
            Plugin::Bridge => configuration["ipMasqNetwork"] = json!(PODS),
        }
        // A port of the node leads to one pod. win-overlay ignores it.
        if pod.address == FIRST {
            let port = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp"});
            configuration["runtimeConfig"]["portMappings"] = json!([port]);
        }
        configuration
    }

    /// The folder of host-local.
    fn addresses(&self) -> PathBuf {
        self.machine.outside().join("addresses")
    }

    /// A pod's endpoint as HNS shows it.
    fn endpoint(&self, pod: &Pod) -> Result<Value> {
        let endpoints = self.hns.emulator.endpoints_of_network(self.network)?;
        let name = format!("{}_pods", pod.name);
        let found = endpoints.iter().find(|endpoint| endpoint.name == name);
        let id = found.with_context(|| format!("no endpoint {name}: {endpoints:?}"))?.id;
        let query = Call::Query { kind: Kind::Endpoint, id, query: String::new() };
        Ok(serde_json::from_str(&self.hns.emulator.call(&query)?)?)
    }

    /// No endpoint, no address, no handle. Of namespaces, only those of the runtime stay.
    fn nothing_is_left(&self) -> Result<()> {
        let endpoints = self.hns.emulator.endpoints_of_network(self.network)?;
        let of_pods: Vec<_> = endpoints.iter().filter(|endpoint| endpoint.name != NODE_ENDPOINT).collect();
        ensure!(of_pods.is_empty(), "{of_pods:?}");
        let open = self.hns.service.open_handles();
        ensure!(open.is_empty(), "open handles: {open:?}");
        let namespaces = Call::Enumerate { kind: Kind::Namespace, query: String::new() };
        let mut namespaces: Vec<Guid> = serde_json::from_str(&self.hns.emulator.call(&namespaces)?)?;
        namespaces.retain(|id| self.hns.emulator.namespace(*id).is_ok_and(|it| it.namespace_id != 1));
        ensure!(self.interface == Interface::New || namespaces.is_empty(), "namespaces: {namespaces:?}");
        for entry in fs::read_dir(self.addresses().join("pods"))? {
            let name = entry?.file_name();
            ensure!(name.to_string_lossy().parse::<Ipv4Addr>().is_err(), "{name:?} is allocated");
        }
        Ok(())
    }
}
