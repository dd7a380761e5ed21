//! What an operator can do about foreign chains that drop packets of pods.

use tortie_kernel::nftables::others::{ForeignTable, TableId};

/// `NFPROTO_IPV6`.
const IPV6: u8 = 10;

/// The remedy for a table: that of its program, if the table shows which one it is.
pub(super) fn of(id: &TableId, table: &ForeignTable) -> String {
    match id.name.as_str() {
        "firewalld" => "Let firewalld accept pods: `firewall-cmd --permanent --zone=trusted --add-source=POOL` for each IPPool, \
             `firewall-cmd --permanent --add-port=4789/udp` (or vxlanPort of FelixConfiguration), `firewall-cmd --reload`"
            .to_owned(),
        // The chain in which Docker leaves room for others.
        "filter" if table.chains.contains_key("DOCKER-USER") => {
            let program = if id.family == IPV6 { "ip6tables" } else { "iptables" };
            format!(
                "Let Docker accept pods: `{program} -I DOCKER-USER -s POOL -j ACCEPT` and \
                 `{program} -I DOCKER-USER -d POOL -j ACCEPT` for each IPPool"
            )
        }
        _ => "If pods lack connections, let it accept the addresses of IPPools, and UDP 4789 (or vxlanPort of FelixConfiguration) \
              between nodes".to_owned(),
    }
}
