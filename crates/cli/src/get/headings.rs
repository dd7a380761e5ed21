//! The headings of calicoctl's `-o custom-columns=NAME,…` (`calicoctl/calicoctl/resourcemgr` of v3.32), as paths.

use anyhow::{Context, bail};
use tortie_api::Kind;

use super::template::Path;

const NAME: (&str, &str) = ("NAME", ".metadata.name");
const NAMESPACE: (&str, &str) = ("NAMESPACE", ".metadata.namespace");

/// The headings of a kind, each with the path of its field.
fn headings(kind: Kind) -> Vec<(&'static str, &'static str)> {
    let of_kind: &[(&str, &str)] = match kind {
        Kind::BgpConfiguration => &[
            ("LOGSEVERITY", ".spec.logSeverityScreen"),
            ("MESHENABLED", ".spec.nodeToNodeMeshEnabled"),
            ("ASNUMBER", ".spec.asNumber"),
        ],
        Kind::BgpPeer => &[("PEERIP", ".spec.peerIP"), ("NODE", ".spec.node"), ("ASN", ".spec.asNumber")],
        Kind::CalicoNodeStatus => &[("NODE", ".spec.node"), ("CLASSES", ".spec.classes[*]")],
        Kind::ClusterInformation => &[
            ("CLUSTERGUID", ".spec.clusterGUID"),
            ("CLUSTERTYPE", ".spec.clusterType"),
            ("CALICOVERSION", ".spec.calicoVersion"),
            ("DATASTOREREADY", ".spec.datastoreReady"),
        ],
        Kind::NetworkPolicy
        | Kind::GlobalNetworkPolicy
        | Kind::StagedNetworkPolicy
        | Kind::StagedGlobalNetworkPolicy => {
            &[("ORDER", ".spec.order"), ("SELECTOR", ".spec.selector"), ("TIER", ".spec.tier")]
        }
        Kind::StagedKubernetesNetworkPolicy => &[("PODSELECTOR", ".spec.podSelector")],
        Kind::NetworkSet | Kind::GlobalNetworkSet => &[("NETS", ".spec.nets[*]")],
        Kind::HostEndpoint => &[
            ("NODE", ".spec.node"),
            ("INTERFACE", ".spec.interfaceName"),
            ("IPS", ".spec.expectedIPs[*]"),
            ("PROFILES", ".spec.profiles[*]"),
        ],
        Kind::IpPool => &[
            ("CIDR", ".spec.cidr"),
            ("NAT", ".spec.natOutgoing"),
            ("IPIPMODE", ".spec.ipipMode"),
            ("VXLANMODE", ".spec.vxlanMode"),
            ("DISABLED", ".spec.disabled"),
            ("DISABLEBGPEXPORT", ".spec.disableBGPExport"),
            ("SELECTOR", ".spec.nodeSelector"),
            ("ASSIGNMENTMODE", ".spec.assignmentMode"),
        ],
        Kind::IpReservation => &[("CIDRS", ".spec.reservedCIDRs[*]")],
        // IPAM's settings are shown as they are stored.
        Kind::IpamConfig => &[
            ("STRICTAFFINITY", ".spec.strict_affinity"),
            ("AUTOALLOCATEBLOCKS", ".spec.auto_allocate_blocks"),
            ("MAXBLOCKSPERHOST", ".spec.maxBlocksPerHost"),
        ],
        // A Node is shown as the one of Kubernetes.
        Kind::Node => &[
            ("ASN", r".metadata.annotations.projectcalico\.org/ASNumber"),
            ("IPV4", r".metadata.annotations.projectcalico\.org/IPv4Address"),
            ("IPV6", r".metadata.annotations.projectcalico\.org/IPv6Address"),
        ],
        Kind::Tier => &[("ORDER", ".spec.order")],
        Kind::WorkloadEndpoint => &[
            ("NODE", ".spec.node"),
            ("ORCHESTRATOR", ".spec.orchestrator"),
            ("WORKLOAD", ".spec.pod"),
            ("NETWORKS", ".spec.ipNetworks[*]"),
            ("NATS", ".spec.ipNATs[*]"),
            ("PROFILES", ".spec.profiles[*]"),
            ("INTERFACE", ".spec.interfaceName"),
        ],
        _ => &[],
    };
    let namespace = kind.namespaced().then_some(NAMESPACE);
    [NAME].into_iter().chain(namespace).chain(of_kind.iter().copied()).collect()
}

/// The columns with these headings.
///
/// # Errors
/// The kinds are several, or have no such heading.
pub(super) fn columns(wanted: &[String], kinds: &[Kind]) -> anyhow::Result<Vec<(String, Path)>> {
    let [kind] = kinds else {
        bail!("headings alone name columns of one kind; for several kinds, use custom-columns=HEADER:PATH,…")
    };
    let known = headings(*kind);
    let column = |heading: &String| {
        let path = known.iter().find(|(name, _)| name == heading).map(|(_, path)| *path);
        let path = path.with_context(|| {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            format!(
                "{heading:?} is no heading of {}; the headings are {}, and custom-columns=HEADER:PATH,… shows any field",
                kind.plural(),
                names.join(", ")
            )
        })?;
        Ok((heading.clone(), Path::parse(path).map_err(anyhow::Error::msg)?))
    };
    wanted.iter().map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_heading_is_a_path() {
        for kind in Kind::all() {
            for (heading, _) in headings(kind) {
                assert!(columns(&[heading.to_owned()], &[kind]).is_ok(), "{kind} {heading}");
            }
        }
        let unknown = columns(&["CIDR".to_owned()], &[Kind::Tier]).unwrap_err().to_string();
        assert!(unknown.contains("NAME, ORDER"), "{unknown}");
        assert!(columns(&["NAME".to_owned()], &[Kind::Tier, Kind::Node]).is_err());
    }
}
