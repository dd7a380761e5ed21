//! Repairs what a check has found.

use tortie_api::{Key, Kind};

use crate::access::Records;
use crate::affinities::Given;
use crate::check::Fix;
use crate::error::IpamError;

impl Records {
    /// Carries out a repair of a check. Returns whether anything was to be done.
    ///
    /// # Errors
    /// [`IpamError::Changed`] if an address is not what the check has seen. The store failed.
    pub async fn repair(&self, fix: &Fix) -> Result<bool, IpamError> {
        match fix {
            Fix::Release(block, release) => {
                let released = self.release_addresses(*block, std::slice::from_ref(release)).await?;
                Ok(!released.is_empty())
            }
            Fix::Forget(handle, block) => {
                let block = Key::global(Kind::IpamBlock, block.to_string());
                self.forget_with(handle, &block, None).await.map(|()| true)
            }
            Fix::Count(handle, block) => {
                let block = Key::global(Kind::IpamBlock, block.to_string());
                self.lower_count(handle, &block).await
            }
            Fix::GiveUp(node, block) => {
                // A node that exists may have begun to use the block since the check.
                let exists = self.store.get(&Key::global(Kind::Node, node)).await?.is_some();
                Ok(self.give_up_block(node, *block, exists, None).await? == Given::Up)
            }
        }
    }
}
