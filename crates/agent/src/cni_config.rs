//! The configuration by which the container runtime calls the plugin. It is written when the agent serves ADD, because
//! kubelets report a node as ready as soon as it exists.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::Path;
use std::str::FromStr;

use ipnet::Ipv4Net;
use serde_json::{Map, Value, json};
use tortie_cni::{AddressSource, NetworkConfig};
use tortie_deploy::{CNI_CONFIG_FILE, CNI_NETWORK, ChainedPlugins, cni_config};

/// Writes the configuration to the runtime's folder. Runtimes see either the old file or the complete new one. Returns the
/// name of a file that the runtime uses instead, if there is one.
pub(crate) fn write(
    folder: &Path,
    chained: &ChainedPlugins,
    ipam: &CniIpam,
    capabilities: &[&str],
) -> io::Result<Option<String>> {
    let mut config = ipam.add_to(cni_config(chained));
    for capability in capabilities {
        config["plugins"][0]["capabilities"][*capability] = json!(true);
    }
    let text = format!("{config:#}\n");
    let path = folder.join(CNI_CONFIG_FILE);
    if fs::read_to_string(&path).is_ok_and(|current| current == text) {
        return preceding(folder);
    }
    fs::create_dir_all(folder)?;
    // Runtimes ignore other endings.
    let unfinished = folder.join(format!(".{CNI_CONFIG_FILE}.unfinished"));
    let mut file = File::create(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, &path)?;
    tracing::info!(file = %path.display(), "wrote the CNI configuration");
    preceding(folder)
}

/// The first configuration of the folder, if it is not Tortie's.
fn preceding(folder: &Path) -> io::Result<Option<String>> {
    let mut first: Option<String> = None;
    for entry in fs::read_dir(folder)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let is_configuration = [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending));
        if is_configuration && first.as_ref().is_none_or(|first| name < *first) {
            first = Some(name);
        }
    }
    Ok(first.filter(|first| first != CNI_CONFIG_FILE))
}

/// The section `ipam` of Tortie's plugin. By default there is none, and Tortie's own IPAM gives the addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CniIpam(Option<Map<String, Value>>);

impl CniIpam {
    /// The addresses of the network in `spec.podCIDRs` of the Node, as flannel's plugin configures it.
    pub(crate) fn host_local() -> Self {
        Self(Some(Map::from_iter([("type".to_owned(), json!("host-local"))])))
    }

    /// The addresses of a network from this one on.
    pub(crate) fn host_local_from(subnet: Ipv4Net, first: Ipv4Addr) -> Self {
        let ranges = json!([[{"subnet": subnet.to_string(), "rangeStart": first.to_string()}]]);
        let section = [("type".to_owned(), json!("host-local")), ("ranges".to_owned(), ranges)];
        Self(Some(Map::from_iter(section)))
    }

    /// The addresses of these networks, one of each.
    #[cfg(target_os = "linux")]
    pub(crate) fn host_local_of(subnets: &[&str]) -> Self {
        let ranges: Vec<Value> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
        let section = [("type".to_owned(), json!("host-local")), ("ranges".to_owned(), json!(ranges))];
        Self(Some(Map::from_iter(section)))
    }

    /// Whether another section than that of [`host_local`](Self::host_local) was written.
    pub(crate) fn is_other_than_host_local(&self) -> bool {
        *self != Self::default() && *self != Self::host_local()
    }

    /// Whether a plugin obtains the addresses, and not the agent.
    pub(crate) fn is_delegated(&self) -> bool {
        let Some(section) = &self.0 else { return false };
        let network: Result<NetworkConfig, _> =
            serde_json::from_value(json!({"name": CNI_NETWORK, "ipam": section}));
        network.is_ok_and(|network| network.address_source().is_ok_and(AddressSource::is_delegated))
    }

    /// Adds it to a configuration. Another IPAM plugin may not know the newest version of the protocol.
    fn add_to(&self, mut config: Value) -> Value {
        let Some(section) = &self.0 else { return config };
        config["plugins"][0]["ipam"] = json!(section);
        if let Some(config) = config.as_object_mut().filter(|_| is_of_another(section)) {
            config.remove("cniVersions");
        }
        config
    }
}

fn is_of_another(section: &Map<String, Value>) -> bool {
    let network: Result<NetworkConfig, _> = serde_json::from_value(json!({"ipam": section}));
    network.is_ok_and(|network| matches!(network.address_source(), Ok(AddressSource::Plugin(_))))
}

impl FromStr for CniIpam {
    type Err = String;

    /// Reads a JSON object. Empty text is none.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let section: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| format!("{error}; use an object such as {{\"type\": \"host-local\"}}"))?;
        let network = json!({"name": CNI_NETWORK, "ipam": section});
        let network: NetworkConfig = serde_json::from_value(network).map_err(|error| error.to_string())?;
        network.address_source().map_err(|failure| failure.to_string())?;
        Ok(Self(Some(section)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_file_is_complete_and_written_only_when_it_differs() {
        let (folder, none) = (tempfile::tempdir().unwrap(), ChainedPlugins::default());
        let (conf_dir, file) =
            (folder.path().join("net.d"), folder.path().join("net.d").join(CNI_CONFIG_FILE));
        write(&conf_dir, &none, &CniIpam::default(), &[]).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), cni_config(&none));
        let inode = fs::metadata(&file).unwrap().ino();
        write(&conf_dir, &none, &CniIpam::default(), &[]).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().ino(), inode);
        fs::write(&file, "{").unwrap();
        write(&conf_dir, &none, &CniIpam::default(), &[]).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert_eq!(fs::read_dir(&conf_dir).unwrap().count(), 1);
    }

    #[test]
    fn the_section_ipam_is_part_of_the_file() {
        let written = |text: &str| {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &ChainedPlugins::default(), &text.parse().unwrap(), &[]).unwrap();
            let text = fs::read_to_string(folder.path().join(CNI_CONFIG_FILE)).unwrap();
            serde_json::from_str::<Value>(&text).unwrap()
        };
        assert_eq!(written(""), cni_config(&ChainedPlugins::default()));
        for (section, has_versions) in
            [(json!({"type": "host-local"}), true), (json!({}), true), (json!({"type": "dhcp"}), false)]
        {
            let config = written(&section.to_string());
            assert_eq!(config["plugins"][0]["ipam"], section);
            assert_eq!(config["cniVersions"].is_array(), has_versions, "{section}");
        }
        for (wrong, expected) in
            [("[]", "use an object"), (r#"{"type": "a/b"}"#, "file name"), ("x", "use an object")]
        {
            assert!(wrong.parse::<CniIpam>().unwrap_err().contains(expected), "{wrong}");
        }
    }

    #[test]
    fn what_the_runtime_passes_is_part_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &ChainedPlugins::default(), &CniIpam::default(), &["dns"]).unwrap();
        let text = fs::read_to_string(folder.path().join(CNI_CONFIG_FILE)).unwrap();
        let written: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(written["plugins"][0]["capabilities"], json!({"dns": true}));
    }

    #[test]
    fn another_configuration_that_comes_first_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for (name, expected) in [
            ("10-calico.conflist", None),
            ("00-multus.conf.disabled", None),
            ("00-multus.conf", Some("00-multus.conf")),
            ("00-a.json", Some("00-a.json")),
        ] {
            fs::write(folder.path().join(name), "{}").unwrap();
            assert_eq!(
                write(folder.path(), &ChainedPlugins::default(), &CniIpam::default(), &[])
                    .unwrap()
                    .as_deref(),
                expected,
                "{name}"
            );
        }
    }
}
