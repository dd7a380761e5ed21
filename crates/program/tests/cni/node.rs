//! A node with an agent, and a runtime that calls the plugins of its network configuration.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tortie_api::{Key, Kind};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, RouteSocket};
use tortie_store::rpc::serve_unix;
use tortie_store::{Embedded, Store};

/// Where Debian keeps plugins.
pub(crate) const OTHER_PLUGINS: &str = "/usr/lib/cni";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 31, 0, 1);
/// The networks of the node's pods.
const POD_CIDRS: [&str; 2] = ["10.77.3.0/29", "fd00:77:3::/64"];
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Node {
    pub namespace: NetNs,
    pub store: Arc<Embedded>,
    pub folder: TempDir,
    runtime: Runtime,
    /// The service of the datastore.
    served: tokio::task::JoinHandle<()>,
    agent: Option<Child>,
    /// More options of the agent.
    options: Vec<String>,
    chained: String,
}

impl Node {
    /// A node whose agent has written the network configuration with these plugins after Tortie's.
    pub(crate) fn new(chained: &Value) -> Self {
        Self::started_after(chained, |_| ())
    }

    /// The same node, with what has been prepared before its agent starts.
    pub(crate) fn started_after(chained: &Value, prepare: impl FnOnce(&Self)) -> Self {
        let node = Self::with_options(chained, &[], prepare);
        until("the network configuration", || node.configuration_file().exists());
        node
    }

    /// The same, with more options of its agent, which may not have written the configuration yet.
    pub(crate) fn with_options(chained: &Value, options: &[&str], prepare: impl FnOnce(&Self)) -> Self {
        let (folder, namespace) = (tempfile::tempdir().unwrap(), NetNs::create().unwrap());
        let add_address = || {
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new("eth0", NewLinkKind::Bridge) }).unwrap();
            let link = interface_index("eth0").unwrap();
            socket
                .change(&Change::AddAddress(Address { link, address: ADDRESS.into(), prefix_length: 24 }))
                .unwrap();
        };
        namespace.run(add_address).unwrap();
        let runtime = Runtime::new().unwrap();
        let store = Arc::new(Embedded::in_memory().unwrap());
        let served = serve(&runtime, &store, &folder);
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tortie"), folder.path().join("bin/tortie-cni"))
            .unwrap();
        let (options, chained) = (options.iter().map(ToString::to_string).collect(), chained.to_string());
        let mut node = Self { namespace, store, folder, runtime, served, agent: None, options, chained };
        let status = json!({"addresses": [{"type": "InternalIP", "address": ADDRESS}]});
        node.put(
            &Key::global(Kind::Node, "one"),
            json!({"metadata": {"name": "one"}, "spec": {"podCIDR": "10.77.3.0/29", "podCIDRs": POD_CIDRS}, "status": status}),
        );
        node.put(&Key::global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}}));
        let pool = json!({"cidr": "10.65.0.0/16", "vxlanMode": "Always"});
        node.put(&Key::global(Kind::IpPool, "pool"), json!({"metadata": {"name": "pool"}, "spec": pool}));
        prepare(&node);
        node.start_agent();
        node
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn configuration_file(&self) -> PathBuf {
        self.path("net.d/00-tortie.conflist")
    }

    pub(crate) fn start_agent(&mut self) {
        let store = format!("unix:{}", self.path("store.sock").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        command.args(["agent", "--node", "one", "--store", &store]).args(&self.options);
        for (flag, file) in [
            ("--cni-socket", "agent.sock"),
            ("--control-socket", "control.sock"),
            ("--deletion-queue", "queue"),
            ("--saved-state", "saved-state.json"),
            ("--cni-conf-dir", "net.d"),
        ] {
            command.arg(flag).arg(self.path(file));
        }
        let log = std::fs::File::options().create(true).append(true).open(self.path("agent.log")).unwrap();
        command.env("TORTIE_CNI_PLUGINS", &self.chained).stdout(log.try_clone().unwrap()).stderr(log);
        self.agent = Some(self.namespace.run(|| command.spawn().unwrap()).unwrap());
    }

    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// Nobody serves the datastore any more.
    pub(crate) fn stop_store(&mut self) {
        self.served.abort();
        let _ = self.runtime.block_on(&mut self.served);
        std::fs::remove_file(self.path("store.sock")).unwrap();
    }

    pub(crate) fn serve_store(&mut self) {
        self.served = serve(&self.runtime, &self.store, &self.folder);
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("agent.log")).unwrap()
    }

    pub(crate) fn stored(&self, key: &Key) -> Option<Value> {
        self.runtime.block_on(self.store.get(key)).unwrap().map(|stored| stored.value)
    }

    pub(crate) fn put(&self, key: &Key, value: Value) {
        self.runtime.block_on(self.store.create(key, value)).unwrap();
    }

    pub(crate) fn delete(&self, key: &Key) {
        self.runtime.block_on(self.store.delete(key, None)).unwrap();
    }

    /// A pod of this node, with the namespace of its sandbox.
    pub(crate) fn pod(&self, name: &str, annotations: Value) -> Sandbox {
        self.pod_with(name, json!({"annotations": annotations}))
    }

    /// A pod with labels.
    pub(crate) fn labelled_pod(&self, name: &str, labels: Value) -> Sandbox {
        self.pod_with(name, json!({"labels": labels}))
    }

    fn pod_with(&self, name: &str, mut metadata: Value) -> Sandbox {
        for (field, value) in [("name", name), ("namespace", "n"), ("uid", name)] {
            metadata[field] = json!(value);
        }
        let spec = json!({"nodeName": "one", "containers": [{"name": "c", "image": "i"}]});
        self.put(&Key::namespaced(Kind::Pod, "n", name), json!({"metadata": metadata, "spec": spec}));
        let (netns, path) = (NetNs::create().unwrap(), self.path(name));
        netns.bind_to(&path).unwrap();
        let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=n;K8S_POD_NAME={name}");
        Sandbox { netns, path, container: format!("container-{name}"), interface: "eth0".to_owned(), args }
    }

    /// The names of all objects of a kind.
    pub(crate) fn names(&self, kind: Kind) -> Vec<String> {
        let items = self.runtime.block_on(self.store.list(kind)).unwrap().items;
        items.into_iter().map(|item| item.key.name.to_string()).collect()
    }

    /// A machine in the node's network.
    pub(crate) fn outside(&self, address: Ipv4Addr) -> NetNs {
        let (machine, path) = (NetNs::create().unwrap(), self.path("outside"));
        machine.bind_to(&path).unwrap();
        let wire = format!(
            "ip link add outside type veth peer name eth0 netns {}; ip link set outside master eth0 up",
            path.display()
        );
        assert_eq!(output_of(&self.namespace, "/bin/sh", &["-ec", &wire]), "");
        let configure = format!("ip link set eth0 up; ip address add {address}/24 dev eth0");
        assert_eq!(output_of(&machine, "/bin/sh", &["-ec", &configure]), "");
        machine
    }

    /// The number of addresses that IPAM has given to pods.
    pub(crate) fn addresses_in_use(&self) -> usize {
        let handles = self.runtime.block_on(self.store.list(Kind::IpamHandle)).unwrap().items;
        handles.iter().filter(|handle| handle.key.name.contains(".container-")).count()
    }

    /// The written configuration, with this agent's sockets.
    pub(crate) fn configuration(&self) -> Value {
        let text = std::fs::read_to_string(self.configuration_file()).unwrap();
        let mut list: Value = serde_json::from_str(&text).unwrap();
        list["plugins"][0]["agentSocket"] = json!(self.path("agent.sock"));
        list["plugins"][0]["deletionQueue"] = json!(self.path("queue"));
        list
    }

    /// The configuration of one plugin of the list, as runtimes pass it.
    pub(crate) fn config_of(&self, plugin: usize, version: &str, more: Value) -> Value {
        let list = self.configuration();
        let mut config = list["plugins"][plugin].clone();
        config["cniVersion"] = json!(version);
        config["name"] = list["name"].clone();
        for (name, value) in more.as_object().into_iter().flatten() {
            config[name] = value.clone();
        }
        config
    }

    /// Executes one plugin: the exit code is 0 or not, and what it prints is JSON or nothing.
    pub(crate) fn execute(&self, environment: &[(&str, &str)], config: &Value) -> Result<Value, Value> {
        let output = self.start(environment, config).wait_with_output().unwrap();
        let printed = match output.stdout.as_slice() {
            [] => Value::Null,
            text => serde_json::from_slice(text).unwrap(),
        };
        if output.status.success() { Ok(printed) } else { Err(printed) }
    }

    /// Starts one plugin.
    pub(crate) fn start(&self, environment: &[(&str, &str)], config: &Value) -> Child {
        let name = config["type"].as_str().unwrap();
        let folders = [self.path("bin"), PathBuf::from(OTHER_PLUGINS)];
        let program = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists()).unwrap();
        let mut command = Command::new(&program);
        command.env_clear().envs(environment.iter().copied()).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("CNI_PATH", format!("{}:{OTHER_PLUGINS}", self.path("bin").display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.namespace.run(|| command.spawn().unwrap()).unwrap();
        child.stdin.take().unwrap().write_all(config.to_string().as_bytes()).unwrap();
        child
    }

    /// Calls Tortie's plugin alone.
    pub(crate) fn call(&self, command: &str, sandbox: &Sandbox, more: Value) -> Result<Value, Value> {
        self.execute(&sandbox.environment(command), &self.config_of(0, "1.1.0", more))
    }

    /// Calls every plugin of the list, as the specification's section 3 says.
    pub(crate) fn call_list(
        &self,
        command: &str,
        sandbox: &Sandbox,
        capabilities: &Map<String, Value>,
        cached: &Value,
    ) -> Result<Value, Value> {
        let list = self.configuration();
        let version = list["cniVersion"].as_str().unwrap();
        let count = list["plugins"].as_array().unwrap().len();
        let mut order: Vec<usize> = (0..count).collect();
        if command == "DEL" {
            order.reverse();
        }
        let mut result = cached.clone();
        for plugin in order {
            let declared = list["plugins"][plugin]["capabilities"].as_object();
            let asked: BTreeMap<_, _> = capabilities
                .iter()
                .filter(|(name, _)| {
                    declared.is_some_and(|declared| declared.get(*name) == Some(&json!(true)))
                })
                .collect();
            let mut more = json!({"runtimeConfig": asked});
            if !result.is_null() {
                more["prevResult"] = result.clone();
            }
            let printed =
                self.execute(&sandbox.environment(command), &self.config_of(plugin, version, more))?;
            if command == "ADD" {
                result = printed;
            }
        }
        Ok(result)
    }
}

fn serve(runtime: &Runtime, store: &Arc<Embedded>, folder: &TempDir) -> tokio::task::JoinHandle<()> {
    let (served, socket) = (store.clone(), folder.path().join("store.sock"));
    runtime.spawn(async move { serve_unix(served, &socket).await.unwrap() })
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.path("agent.log")).unwrap_or_default();
            let _ = std::io::stderr().write_all(log.as_bytes());
        }
        unbind_namespaces(&self.folder);
    }
}

/// The sandbox of a pod.
pub(crate) struct Sandbox {
    pub netns: NetNs,
    pub path: PathBuf,
    pub container: String,
    pub interface: String,
    pub args: String,
}

impl Sandbox {
    pub(crate) fn environment<'a>(&'a self, command: &'a str) -> Vec<(&'a str, &'a str)> {
        vec![
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", &self.container),
            ("CNI_NETNS", self.path.to_str().unwrap()),
            ("CNI_IFNAME", &self.interface),
            ("CNI_ARGS", &self.args),
        ]
    }

    /// Another attachment of the same container.
    pub(crate) fn with_interface(&self, name: &str) -> Self {
        Self { interface: name.to_owned(), ..self.of_container(&self.container) }
    }

    /// Another container of the same pod, in the same network namespace.
    pub(crate) fn of_container(&self, container: &str) -> Self {
        Self {
            netns: NetNs::open(&self.path).unwrap(),
            path: self.path.clone(),
            container: container.to_owned(),
            interface: self.interface.clone(),
            args: self.args.clone(),
        }
    }

    pub(crate) fn has_interface(&self, name: &str) -> bool {
        self.netns.run(|| interface_index(name).is_ok()).unwrap()
    }
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Removes the bound namespaces in a folder, which would outlive the test and keep the folder.
pub(crate) fn unbind_namespaces(folder: &TempDir) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        // Other files are no mounts, which is an error.
        let _ = NetNs::unbind(&entry.path());
    }
}

/// The address of the pod in a result.
pub(crate) fn address(result: &Value) -> Ipv4Addr {
    let text = result["ips"][0]["address"].as_str().unwrap();
    text.split('/').next().unwrap().parse().unwrap()
}

/// Runs a program in a namespace and returns what it prints.
pub(crate) fn output_of(namespace: &NetNs, program: impl AsRef<Path>, arguments: &[&str]) -> String {
    let mut command = Command::new(program.as_ref());
    command.args(arguments);
    let output = namespace.run(|| command.output().unwrap()).unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
