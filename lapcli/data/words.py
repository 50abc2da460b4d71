"""Plain English words to build keys from."""

ADJECTIVES: tuple[str, ...] = tuple(
    """
    amber ancient arid austere blunt brazen brisk broad calm careful cheerful clever cloudy coarse cold copper
    crimson curious dapper deep distant dusty eager early earnest elder faint feral fierce fluid foggy frank fresh
    frozen gentle gilded gleaming golden grand grave hasty hidden hollow honest humble icy idle inland ivory jolly
    keen kind late lavish lean level light little lively lonely long loose loud lucid lunar mellow mild misty modest
    muted narrow neat nimble noble northern odd olive open pale patient plain polite proud quick quiet rapid rare
    ready rigid rising robust rough round royal rustic sandy scarlet secret serene sharp short shy silent silver
    simple sleepy slender slow smooth sober solar solid sour southern spare spotted stark steady steep stern still
    stout strange sturdy subtle sudden sunny swift tall tame tender thick thin tidy tiny tough upper useful vague
    vast velvet violet vivid warm wary weary western white wide wild wise witty wooden worthy young zealous
    """.split()  # noqa: SIM905 -- six hundred lines otherwise
)

NOUNS: tuple[str, ...] = tuple(
    """
    acorn anchor anvil apple arch arrow badge banner barge barn barrel basin basket bath beacon bead bell bench
    berry blade blanket bolt book bottle bowl branch brick bridge brook broom brush bucket button cabin cable candle
    canoe canvas carpet cart castle cave cellar chain chair chalk chart chest church circle cliff clock cloud coach
    coat coin comet copper cord cottage crane creek crown curtain desk dial dome door drum engine fabric falcon farm
    feather fence ferry field flag flame flask flute forest forge fountain fox galley garden gate glove goat grain
    grove guitar hammer harbor harp hat hedge heron hill hinge horn horse house inkwell island jacket jar kettle key
    kite ladder lake lamp lantern leaf ledger lemon letter lever library lily lion locket loom magnet map marble
    market mask mast meadow medal mill mirror mitten mountain museum needle nest net oak oar orchard organ otter
    oven owl paddle palace parcel path pearl pebble pen pillow pine pistol plate plough pocket pond port prism pump
    quarry quill raft rail raven ribbon ring river road robe rocket roof rope rose saddle sail scale school shelf
    shell ship shoe shovel sled spade spear spoon spring stable stair statue stone stove street sword table temple
    tent thread throne tile timber torch tower train tray trunk tunnel turnip valley vase veil vessel village violin
    wagon wall well whale wharf wheel whistle willow window wing wolf yard
    """.split()  # noqa: SIM905 -- six hundred lines otherwise
)
