//! Folders and access lists of what only administrators and the system may use, and whether somebody else made them.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::windows::ffi::OsStrExt;
use std::os::windows::ffi::OsStringExt;
use std::os::windows::fs::{MetadataExt, OpenOptionsExt};
use std::os::windows::io::{AsHandle, AsRawHandle, BorrowedHandle, FromRawHandle, OwnedHandle};
use std::path::{Path, PathBuf};

use windows_sys::Win32::Foundation::{ERROR_ALREADY_EXISTS, LocalFree};
use windows_sys::Win32::Security::Authorization::{
    ConvertSidToStringSidW, ConvertStringSecurityDescriptorToSecurityDescriptorW, GetSecurityInfo,
    SDDL_REVISION_1, SE_FILE_OBJECT, SE_KERNEL_OBJECT, SE_OBJECT_TYPE, SetSecurityInfo,
};
use windows_sys::Win32::Security::{
    ACL, DACL_SECURITY_INFORMATION, EqualSid, GetSecurityDescriptorDacl, GetTokenInformation, IsWellKnownSid,
    OWNER_SECURITY_INFORMATION, PROTECTED_DACL_SECURITY_INFORMATION, PSECURITY_DESCRIPTOR, PSID,
    SECURITY_ATTRIBUTES, TOKEN_QUERY, TokenOwner, TokenUser, WinBuiltinAdministratorsSid, WinLocalSystemSid,
};
use windows_sys::Win32::Storage::FileSystem::{
    CreateDirectoryW, FILE_ATTRIBUTE_REPARSE_POINT, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_OPEN_REPARSE_POINT,
    FILE_READ_ATTRIBUTES, READ_CONTROL, WRITE_DAC,
};
use windows_sys::Win32::System::Com::CoTaskMemFree;
use windows_sys::Win32::System::Threading::{GetCurrentProcess, OpenProcessToken};
use windows_sys::Win32::UI::Shell::{FOLDERID_ProgramData, SHGetKnownFolderPath};

/// Nothing is inherited; administrators and the system may do everything, also with what is created inside.
const ADMINISTRATORS: &str = "D:P(A;OICI;GA;;;BA)(A;OICI;GA;;;SY)";

/// Lets only administrators and the system connect to a named pipe. The handle needs the right to change the access list.
///
/// # Errors
/// The system refuses.
pub fn restrict_pipe(pipe: &impl AsHandle) -> io::Result<()> {
    restrict(pipe.as_handle(), SE_KERNEL_OBJECT)
}

/// Checks that an administrator, the system or this user created a named pipe. Any user can create a pipe of a name that is
/// free, and would get what is sent to it.
///
/// # Errors
/// Somebody else created it, or the system does not say who.
pub fn check_pipe(pipe: &impl AsHandle) -> io::Result<()> {
    check_owner(pipe.as_handle(), SE_KERNEL_OBJECT, "the pipe")
}

/// Creates a folder that only administrators and the system can use, with what is in it. One that is there is restricted in
/// the same way. Any user can create a folder below `%ProgramData%`, or a link to another folder.
///
/// # Errors
/// The folder is a link, or somebody else created it; or the system refuses.
pub fn private_folder(path: &Path) -> io::Result<()> {
    let name: Vec<u16> = path.as_os_str().encode_wide().chain([0]).collect();
    let descriptor = Descriptor::for_administrators()?;
    let attributes = SECURITY_ATTRIBUTES {
        nLength: u32::try_from(size_of::<SECURITY_ATTRIBUTES>()).unwrap_or_default(),
        lpSecurityDescriptor: descriptor.0,
        bInheritHandle: 0,
    };
    // SAFETY: the name ends with NUL; the attributes and their descriptor live longer than the call.
    if unsafe { CreateDirectoryW(name.as_ptr(), &raw const attributes) } != 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(ERROR_ALREADY_EXISTS.cast_signed()) {
        return Err(error);
    }
    let mut options = File::options();
    options.access_mode(READ_CONTROL | WRITE_DAC | FILE_READ_ATTRIBUTES);
    // The folder itself, not what a link leads to.
    options.custom_flags(FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT);
    let folder = options.open(path)?;
    let metadata = folder.metadata()?;
    if !metadata.is_dir() || metadata.file_attributes() & FILE_ATTRIBUTE_REPARSE_POINT != 0 {
        let problem = format!("{} is a link or no folder: remove it", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    check_owner(folder.as_handle(), SE_FILE_OBJECT, &path.display().to_string())?;
    restrict(folder.as_handle(), SE_FILE_OBJECT)
}

/// The folder for data of programs. Unlike the variable `ProgramData`, whoever starts the process does not choose it.
pub fn program_data() -> PathBuf {
    let mut path = std::ptr::null_mut();
    // SAFETY: the folder's identifier lives longer than the call; no user is named; the result is a place for a pointer.
    let code = unsafe { SHGetKnownFolderPath(&FOLDERID_ProgramData, 0, std::ptr::null_mut(), &raw mut path) };
    let mut units = Vec::new();
    if code >= 0 && !path.is_null() {
        // SAFETY: the text ends with NUL, and nothing behind it is read.
        while let unit @ 1.. = unsafe { *path.add(units.len()) } {
            units.push(unit);
        }
    }
    // SAFETY: the text was allocated for the caller, and is freed once; null is allowed.
    unsafe { CoTaskMemFree(path.cast()) };
    if units.is_empty() { r"C:\ProgramData".into() } else { OsString::from_wide(&units).into() }
}

/// A security descriptor that the system has allocated.
struct Descriptor(PSECURITY_DESCRIPTOR);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was allocated for the caller, and is freed once.
        unsafe { LocalFree(self.0) };
    }
}

impl Descriptor {
    fn for_administrators() -> io::Result<Self> {
        let text: Vec<u16> = ADMINISTRATORS.encode_utf16().chain([0]).collect();
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: the text ends with NUL; the result is a place for a pointer; nobody asks for the size.
        let converted = unsafe {
            ConvertStringSecurityDescriptorToSecurityDescriptorW(
                text.as_ptr(),
                SDDL_REVISION_1,
                &raw mut descriptor,
                std::ptr::null_mut(),
            )
        };
        if converted == 0 { Err(io::Error::last_os_error()) } else { Ok(Self(descriptor)) }
    }
}

fn restrict(object: BorrowedHandle<'_>, kind: SE_OBJECT_TYPE) -> io::Result<()> {
    let descriptor = Descriptor::for_administrators()?;
    let (mut present, mut list, mut is_default) = (0, std::ptr::null_mut::<ACL>(), 0);
    // SAFETY: the descriptor is valid; the results are places for their values.
    let found = unsafe {
        GetSecurityDescriptorDacl(descriptor.0, &raw mut present, &raw mut list, &raw mut is_default)
    };
    if found == 0 || present == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the handle is open, and the list, which is part of the descriptor, is valid until that is freed.
    let code = unsafe {
        SetSecurityInfo(
            object.as_raw_handle(),
            kind,
            DACL_SECURITY_INFORMATION | PROTECTED_DACL_SECURITY_INFORMATION,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            list,
            std::ptr::null_mut(),
        )
    };
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.cast_signed())) }
}

fn check_owner(object: BorrowedHandle<'_>, kind: SE_OBJECT_TYPE, what: &str) -> io::Result<()> {
    let (mut owner, mut descriptor): (PSID, _) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the handle is open; the results are places for pointers, and nobody asks for the others.
    let code = unsafe {
        GetSecurityInfo(
            object.as_raw_handle(),
            kind,
            OWNER_SECURITY_INFORMATION,
            &raw mut owner,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &raw mut descriptor,
        )
    };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code.cast_signed()));
    }
    let _descriptor = Descriptor(descriptor);
    if !owner.is_null() {
        let known = [WinBuiltinAdministratorsSid, WinLocalSystemSid];
        // SAFETY: the owner is part of the descriptor, which is not freed yet.
        if known.into_iter().any(|sid| unsafe { IsWellKnownSid(owner, sid) } != 0) || is_this_process(owner)?
        {
            return Ok(());
        }
    }
    let problem =
        format!("another user ({}) has created {what}, so it is not used: remove it", name_of(owner));
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

/// A security identifier as text (`S-1-5-…`).
fn name_of(sid: PSID) -> String {
    let mut text = std::ptr::null_mut();
    // SAFETY: the identifier is valid or null, which the call refuses; the result is a place for a pointer.
    if sid.is_null() || unsafe { ConvertSidToStringSidW(sid, &raw mut text) } == 0 || text.is_null() {
        return "of whom the system does not tell".into();
    }
    let mut units = Vec::new();
    // SAFETY: the text ends with NUL, and nothing behind it is read.
    while let unit @ 1.. = unsafe { *text.add(units.len()) } {
        units.push(unit);
    }
    // SAFETY: the text was allocated for the caller, and is freed once.
    unsafe { LocalFree(text.cast()) };
    String::from_utf16_lossy(&units)
}

/// Whether objects that this process creates belong to a user or group: to its user, or to what its token names as the
/// owner (a group such as the administrators, or Wine's group of all users).
fn is_this_process(sid: PSID) -> io::Result<bool> {
    let mut token = std::ptr::null_mut();
    // SAFETY: the handle of the process needs no closing; the result is a place for a handle.
    if unsafe { OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &raw mut token) } == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the handle was opened for the caller, and is closed once.
    let token = unsafe { OwnedHandle::from_raw_handle(token) };
    // Room for the structure and the longest identifier behind it (68 bytes), aligned for pointers.
    let mut buffer = [0_u64; 32];
    let length = u32::try_from(size_of_val(&buffer)).unwrap_or_default();
    for class in [TokenUser, TokenOwner] {
        let mut used = 0;
        // SAFETY: the buffer has this length, and the token is open.
        let found = unsafe {
            GetTokenInformation(
                token.as_raw_handle(),
                class,
                buffer.as_mut_ptr().cast(),
                length,
                &raw mut used,
            )
        };
        if found == 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both structures (`TOKEN_USER`, `TOKEN_OWNER`) begin with a pointer to an identifier, which leads into the
        // buffer.
        let own = unsafe { *buffer.as_ptr().cast::<PSID>() };
        // SAFETY: both identifiers are valid.
        if unsafe { EqualSid(sid, own) } != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}
