//! What a cubin says of its kernels, for tests.
//!
//! A cubin is an ELF file. Its section `.nv.info` lists attributes by symbol: registers and the length of the stack frame,
//! which is where values go that find no register. `.nv.info.NAME` lists the parameters of the kernel `NAME`.

/// One kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) name: String,
    pub(crate) n_registers: u32,
    /// Local memory of a thread.
    pub(crate) local_bytes: u32,
    pub(crate) n_params: usize,
}

/// Type of the section of symbols.
const SYMBOLS: u32 = 2;
/// Attributes whose value has a length of its own.
const WITH_LENGTH: u8 = 4;
const FRAME_BYTES: u8 = 0x11;
const PARAM: u8 = 0x17;
const REGISTERS: u8 = 0x2f;

struct Section<'a> {
    name: String,
    kind: u32,
    link: usize,
    bytes: &'a [u8],
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes")))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize
}

fn text_at(bytes: &[u8], at: usize) -> String {
    let end = bytes[at..].iter().position(|&byte| byte == 0).expect("a text ends");
    String::from_utf8(bytes[at..at + end].to_vec()).expect("a name")
}

fn sections(cubin: &[u8]) -> Vec<Section<'_>> {
    let (start, len) = (u64_at(cubin, 0x28), u16_at(cubin, 0x3a));
    let (n, names_idx) = (u16_at(cubin, 0x3c), u16_at(cubin, 0x3e));
    let header = |idx: usize| &cubin[start + idx * len..][..len];
    // A section of this type has a length, but no bytes.
    let is_empty = |header: &[u8]| u32_at(header, 4) == 8;
    let bytes = |header: &[u8]| match is_empty(header) {
        true => &[][..],
        false => &cubin[u64_at(header, 24)..][..u64_at(header, 32)],
    };
    let names = bytes(header(names_idx));
    let section = |idx| {
        let header = header(idx);
        let (kind, link) = (u32_at(header, 4), u32_at(header, 40) as usize);
        Section { name: text_at(names, u32_at(header, 0) as usize), kind, link, bytes: bytes(header) }
    };
    (0..n).map(section).collect()
}

/// The attributes of a list: which, and the words of its value.
fn attributes(mut list: &[u8]) -> Vec<(u8, Vec<u32>)> {
    let mut found = Vec::new();
    while list.len() >= 4 {
        let (format, attribute, value) = (list[0], list[1], u16_at(list, 2));
        let n_bytes = if format == WITH_LENGTH { value } else { 0 };
        let words = list[4..4 + n_bytes].chunks_exact(4).map(|word| u32_at(word, 0)).collect();
        found.push((attribute, words));
        list = &list[4 + n_bytes..];
    }
    found
}

/// The kernels of a cubin.
pub(crate) fn usage(cubin: &[u8]) -> Vec<Usage> {
    let sections = sections(cubin);
    let symbols = sections.iter().find(|section| section.kind == SYMBOLS).expect("a cubin has symbols");
    let names = sections[symbols.link].bytes;
    let name = |symbol: u32| text_at(names, u32_at(symbols.bytes, 24 * symbol as usize) as usize);
    let info =
        sections.iter().find(|section| section.name == ".nv.info").expect("a cubin says what it takes");
    let by_symbol: Vec<_> = attributes(info.bytes)
        .into_iter()
        .filter(|(attribute, _)| [REGISTERS, FRAME_BYTES].contains(attribute))
        .map(|(attribute, words)| (attribute, name(words[0]), words[1]))
        .collect();
    let of = |wanted: u8, kernel: &str| {
        let mut all = by_symbol.iter().filter(|(attribute, name, _)| *attribute == wanted && name == kernel);
        all.next().map(|&(.., value)| value)
    };
    let kernels =
        sections.iter().filter_map(|section| Some((section.name.strip_prefix(".nv.info.")?, section)));
    kernels
        .map(|(kernel, section)| Usage {
            name: kernel.to_owned(),
            n_registers: of(REGISTERS, kernel).expect("a kernel has registers"),
            local_bytes: of(FRAME_BYTES, kernel).expect("a kernel has a frame"),
            n_params: attributes(section.bytes).iter().filter(|(attribute, _)| *attribute == PARAM).count(),
        })
        .collect()
}
