"""Common English words that prompts are made of: nearly all are a single token in the usual vocabularies."""

WORDS = tuple(
    """
    about above across after again against air all almost along already also always among and animal another
    answer any area around art ask away back bad ball bank base be bear beat beautiful because bed been
    before began begin behind being believe below best better between big bird black blood blue board boat
    body book both bottom box boy bread break bridge bright bring brother brought brown build building
    business but buy by call came can car care carry case cat catch cause center century certain chair chance
    change check child children church circle city class clean clear clock close clothes cloud coat cold
    color come common company complete contain control cook cool copy corn corner cost could country course
    cover cross crowd cry cut dance dark day dead deal death decide deep did different difficult dinner
    direct do doctor does dog door doubt down draw dream dress drink drive drop dry during dust each ear
    early earth east easy eat edge effect egg eight either else empty end enough even evening event ever
    every example except eye face fact fair fall family far farm fast father fear feel feet fell few field
    fight figure fill final find fine finger finish fire first fish fit five floor flow flower fly follow
    food foot for force forest form forward found four free fresh friend from front fruit full game garden
    gave general gentle get girl give glass go gold gone good grass gray great green ground group grow guess
    had hair half hall hand happen happy hard has hat have he head hear heart heat heavy held help her here
    high hill him his history hit hold hole home hope horse hot hotel hour house how human hundred ice idea
    if important in inch industry inside into iron is island it job join just keep key kind king kitchen knew
    know lake land language large last late laugh law lay lead learn least leave left leg length less let
    letter level life lift light like line list listen little live local long look lost lot love low machine
    made main make man many map mark market matter may meal mean measure meat meet member men middle might
    mile milk mind minute miss modern moment money month moon more morning most mother mountain mouth move
    much music must my name nation nature near need never new news next night nine no north nose not note
    nothing notice now number object ocean of off office often oil old on once one only open or orange order
    other our out outside over own page paint pair paper part party pass past path pattern pay people perhaps
    person phone picture piece place plain plan plant play please point poor position possible power present
    press problem product public pull push put question quick quiet rain ran reach read ready real reason
    record red remember rest result rich ride right ring rise river road rock roll room round rule run safe
    said sail same sand save saw say school science sea season seat second see seem seen self sell send sense
    sent serve set seven several shape she ship shoe short should show side sight sign silver simple since
    sing sister sit six size skin sky sleep slow small snow so soft soil some song soon sound south space
    speak special speed spell spend spoke spring square stand star start state stay step still stone stood
    stop store story straight strange street strong student such sugar summer sun sure surface system table
    take talk tall teacher team tell ten test than that the their them then there these they thing think
    third this those though thought thousand three through time to together told too took top touch toward
    town trade train travel tree trip trouble true trust try turn twenty two under unit until up upon us use
    usual valley very view village visit voice wait walk wall want war warm was wash watch water wave way we
    wear weather week weight well went were west what wheel when where which while white who whole why wide
    wife wild will wind window winter wish with without woman wonder wood word work world would write wrong
    year yellow yes yet you young your
    """.split()  # noqa: SIM905 - one word a line is no easier to read
)
