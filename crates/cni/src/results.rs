//! The results of CNI plugins that container runtimes keep: one file for each interface of each sandbox
//! (`libcni/api.go` of containernetworking/cni, kind `cniCacheV1`).

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use serde_json::Value;

/// Where libcni keeps results, as containerd and CRI-O use it. On Windows, the folder is on the drive of the runtime.
pub const FOLDER: &str = "/var/lib/cni/results";

/// The maximum size of a file. The usual ones have a few kilobytes.
const MAX_BYTES: u64 = 1 << 20;

/// What plugins have answered for an interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptResult {
    /// The identifier of the sandbox.
    pub container_id: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The name of the interface in the pod.
    pub interface: String,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The interfaces that the plugins have on the host for it. Plugins for Windows name the HNS endpoint here.
    pub host_interfaces: Vec<String>,
    /// The network namespaces of the other interfaces.
    pub sandboxes: BTreeSet<String>,
}

impl KeptResult {
    /// Whether it is about this interface of this pod.
    pub fn is_of(&self, namespace: &str, pod: &str, interface: &str) -> bool {
        self.namespace == namespace && self.pod == pod && self.interface == interface
    }

    /// Reads a file. `None` if it is not complete (yet), or not about a pod.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let file: Value = serde_json::from_slice(text).ok()?;
        let arguments = file["cniArgs"].as_array()?;
        let argument = |name: &str| {
            let pair = arguments.iter().find(|pair| pair[0] == name)?;
            pair[1].as_str().filter(|value| !value.is_empty()).map(str::to_owned)
        };
        let interface = file["ifName"].as_str()?.to_owned();
        let result = &file["result"];
        let sandbox_of = |it: &Value| it["sandbox"].as_str().unwrap_or_default().to_owned();
        let interfaces = result["interfaces"].as_array().into_iter().flatten();
        let (on_host, in_pod): (Vec<_>, Vec<_>) = interfaces.partition(|it| sandbox_of(it).is_empty());
        // Some plugins list the pod's own interface without its sandbox.
        let names = on_host.iter().filter_map(|it| it["name"].as_str()).filter(|name| *name != interface);
        let ips = result["ips"].as_array().into_iter().flatten();
        Some(Self {
            container_id: file["containerId"].as_str().unwrap_or_default().to_owned(),
            namespace: argument("K8S_POD_NAMESPACE")?,
            pod: argument("K8S_POD_NAME")?,
            addresses: ips.filter_map(|ip| address(ip["address"].as_str()?)).collect(),
            host_interfaces: names.map(str::to_owned).collect(),
            sandboxes: in_pod.into_iter().map(sandbox_of).collect(),
            interface,
        })
    }
}

fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpNet>().map(|net| net.addr()).or_else(|_| text.parse()).ok()
}

/// Reads the files of a folder. A folder that does not exist (yet) has none.
///
/// # Errors
/// The folder cannot be read.
pub fn read(folder: &Path) -> io::Result<Vec<KeptResult>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry?;
        // The type is that of a link itself. A file may be deleted meanwhile; any other failure must not look like that.
        let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        match entry.metadata() {
            Ok(file) if file.is_file() && file.len() <= MAX_BYTES => {}
            Err(error) if !gone(&error) => return Err(error),
            Ok(_) | Err(_) => continue,
        }
        match std::fs::read(entry.path()) {
            Ok(text) => all.extend(KeptResult::parse(&text)),
            Err(error) if gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_that_is_not_of_a_pod_or_not_complete_is_left_out() {
        let complete = json!({
            "ifName": "eth0", "cniArgs": [["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", "p"]],
            "result": {"interfaces": [{"name": "veth1"}], "ips": [{"address": "10.0.0.1/24"}, {"address": "x"}]},
        });
        let read = KeptResult::parse(complete.to_string().as_bytes()).unwrap();
        assert!(read.is_of("n", "p", "eth0") && !read.is_of("n", "q", "eth0"));
        assert_eq!(read.addresses, ["10.0.0.1".parse().unwrap()].into());
        assert!(!read.is_of("n", "p", "net1"));
        let text = complete.to_string();
        assert_eq!(KeptResult::parse(&text.as_bytes()[..text.len() - 1]), None, "it is still being written");
        for (field, value) in [
            ("cniArgs", json!([["K8S_POD_NAME", "p"]])),
            ("cniArgs", json!([["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", ""]])),
            ("cniArgs", json!(null)),
            ("ifName", json!(1)),
        ] {
            let mut other = complete.clone();
            other[field] = value.clone();
            assert_eq!(KeptResult::parse(other.to_string().as_bytes()), None, "{field}: {value}");
        }
    }

    /// A folder may have anything in it.
    #[test]
    #[cfg(unix)]
    fn only_files_of_a_usual_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let result = json!({
            "ifName": "eth0", "cniArgs": [["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", "p"]], "result": {},
        });
        assert_eq!(read(&at("missing")).unwrap(), []);
        std::fs::write(at("whole"), result.to_string()).unwrap();
        std::fs::write(at("large"), format!("{result}{}", " ".repeat(1 << 20))).unwrap();
        std::os::unix::fs::symlink(at("whole"), at("link")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        assert_eq!(read(folder.path()).unwrap().len(), 1);
        assert!(read(&at("whole")).is_err());
    }
}
