//! Reports that packets with the address of a pod of this node come from elsewhere (policy decision 49).

use tortie_dataplane::{Condition, Reason};
use tortie_kernel::nftables::Nft;

use super::skeleton::FROM_OUTSIDE;

/// The packets that the chain [`FROM_OUTSIDE`] has dropped.
#[derive(Debug, Default)]
pub(super) struct FromOutside {
    /// The count at the last comparison. Without one, this process has not looked yet.
    counted: Option<u64>,
    /// Whether there were more between the last two comparisons.
    is_going_on: bool,
}

impl FromOutside {
    /// Reads the count. A count that cannot be read changes nothing, since it is not policy.
    pub(super) fn look(&mut self, nft: &mut Nft, table: &str) {
        match nft.counted_rules(table, FROM_OUTSIDE) {
            Ok(rules) => {
                let counted = rules.iter().filter_map(|rule| rule.count).map(|count| count.packets).sum();
                // The count of a new chain begins at zero.
                self.is_going_on = self.counted.is_some_and(|before| counted > before);
                self.counted = Some(counted);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read how many packets with the address of a pod came from elsewhere; Tortie retries");
            }
        }
    }

    /// The condition, while there are such packets.
    pub(super) fn condition(&self) -> Option<Condition> {
        let message = "packets from elsewhere had the address of a pod of this node and were dropped: somebody forges them, or a router or load \
                       balancer returns packets of the node's own pods. If it is to do so, set the annotation \
                       tortie.io/podSourcesFromOutside: Allow of FelixConfiguration, and other machines can send as pods of this node";
        self.is_going_on.then(|| Condition::new(Reason::PodAddressFromOutside, message.to_owned()))
    }
}
